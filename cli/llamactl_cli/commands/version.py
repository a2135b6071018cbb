"""`llamactl version`: of the command, of the daemon that runs, of the engine it was given."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer
from llamactl_supervisor.errors import DaemonUnreachableError

from llamactl_cli import text, versions
from llamactl_cli.connect import connect

if TYPE_CHECKING:
    from llamactl_cli.output import Output


@dataclass(frozen=True)
class VersionView:
    """None is what cannot be known: no daemon, or no engine asked for."""

    cli: str
    daemon: str | None
    engine: str | None
    engine_path: str | None

    def text(self) -> str:
        """Return a line for each."""
        engine = self.engine_path and (self.engine or "does not say")
        rows = [
            ("llamactl", self.cli),
            ("daemon", self.daemon),
            ("engine", engine),
            ("", self.engine_path),
        ]
        return text.table(rows)

    def data(self) -> dict[str, Any]:
        """Return the same."""
        return asdict(self)


def version(ctx: typer.Context) -> None:
    """Print the versions of command, daemon and engine.

    Says so when the first two differ, as after an upgrade.
    """
    output: Output = ctx.obj
    cli = versions.own()
    daemon = engine_path = None
    try:
        with connect(output) as client:
            found = client.any_status()
    except DaemonUnreachableError as exc:
        output.say(exc.message)
    else:
        daemon = found.daemon.version
        engine_path = None if found.desired is None else found.desired.engine_path
    if daemon not in (None, cli):
        output.say(
            f"the daemon is version {daemon}, this command {cli}: `llamactl down`, then `up`, "
            "brings the new one"
        )
    engine = None if engine_path is None else versions.of_engine(engine_path)
    output.emit(VersionView(cli, daemon, engine, engine_path))
