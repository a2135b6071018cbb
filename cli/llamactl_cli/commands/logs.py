"""`llamactl logs`: what the engine wrote."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from llamactl_supervisor.errors import Code, DaemonUnreachableError

from llamactl_cli import text
from llamactl_cli.connect import connect
from llamactl_cli.moments import Since
from llamactl_cli.options import LOG_LINES_MAX, log_lines
from llamactl_cli.output import LAST_LINES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamactl_supervisor.models import Status

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
    raw: Annotated[
        bool, typer.Option("--raw", help="Control characters as they are; some steer a terminal.")
    ] = False,
) -> None:
    """Print the engine's last log lines.

    Each with its UTC time and stream, control characters written out; with --json one object to a
    line. 200 lines, or all since a time; rotated files are part of it. Without a daemon (exit 4)
    they are read from the files, and the daemon's own last lines are with the error.
    """
    output: Output = ctx.obj
    if lines is None:
        lines = LINES if since is None else LOG_LINES_MAX
    with connect(output) as client:
        paths, log, empty = client.paths, client.paths.engine_log, True
        try:
            for doubt in _missing(client.status()):
                output.say(doubt)
            with closing(client.logs(lines=lines, follow=follow, since=since)) as found:
                for line in found:
                    empty = False
                    if not output.emit_line(LogLine(line), raw=raw):
                        return
        except DaemonUnreachableError as exc:
            from llamactl_supervisor.logs import last

            for line in last(log, lines, since) if empty else ():
                output.emit_line(LogLine(line), raw=raw)
            exc.hint = f"what the engine wrote is in {log}"
            if said := last(paths.daemon_log, LAST_LINES_MAX):
                exc.details["last_lines"] = said
                exc.hint += f"; the lines with this are the last of {paths.daemon_log}"
            raise
    if empty and lines:
        output.say(f"no lines in {log}" if log.exists() else f"there is no log: {log} is missing")


def _missing(status: Status) -> Iterator[str]:
    """Say what the engine writes, or wrote, that is not in its log."""
    problem, engine = status.problem, status.engine
    if problem is not None and problem.code in {Code.HOLDER_LOST, Code.HOLDER_STOPPED}:
        yield f"{problem.message} ({problem.hint})"
    if engine is not None and engine.log_dropped_bytes:
        yield f"{text.size(engine.log_dropped_bytes)} are missing: no disk took them"
