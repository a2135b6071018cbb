"""`llamactl logs`: what the engine wrote."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamactl_cli.connect import connect
from llamactl_cli.moments import Since
from llamactl_cli.options import LOG_LINES_MAX, log_lines

if TYPE_CHECKING:
    from llamactl_cli.output import Output

LINES = 200


@dataclass(frozen=True)
class LogLine:
    """One line as the log has it: UTC time, stream, text."""

    line: str

    def text(self) -> str:
        """Return the line."""
        return self.line

    def data(self) -> dict[str, Any]:
        """Return its three parts."""
        at, stream, text = (*self.line.split(" ", 2), "", "")[:3]
        return {"at": at, "stream": stream, "text": text}


def logs(
    ctx: typer.Context,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines until interrupted.")
    ] = False,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines", "-n", parser=log_lines, metavar="LINES", help="Lines to begin with."
        ),
    ] = None,
    since: Since = None,
) -> None:
    """Print the engine's last log lines.

    Each with its UTC time and stream; with --json one object to a line. 200 lines, or all since
    a time; rotated files are part of it.
    """
    from llamactl_supervisor.errors import DaemonUnreachableError

    output: Output = ctx.obj
    if lines is None:
        lines = LINES if since is None else LOG_LINES_MAX
    with connect(output) as client:
        try:
            with closing(client.logs(lines=lines, follow=follow, since=since)) as found:
                for line in found:
                    if not output.emit_line(LogLine(line)):
                        return
        except DaemonUnreachableError as exc:
            exc.hint = f"what the engine wrote is in {client.paths.engine_log}"
            raise
