"""`llamactl version`: of the command, of the daemon that runs, of the engine it was given."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import typer
from llamactl_supervisor.errors import DaemonUnreachableError

from llamactl_cli import text

if TYPE_CHECKING:
    from llamactl_cli.output import Output

DISTRIBUTION = "llamactl-sidecar"
ENGINE_ANSWER_S = 10.0


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
    from llamactl_supervisor.client import ControlClient

    output: Output = ctx.obj
    cli = _own()
    daemon = engine_path = None
    try:
        with ControlClient() as client:
            found = client.status()
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
    engine = None if engine_path is None else _engine_version(engine_path)
    output.emit(VersionView(cli, daemon, engine, engine_path))


def _own() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"


def _engine_version(path: str) -> str | None:
    """Return what the binary says it is, e.g. `11312 (0c1e570)`."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ENGINE_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = (done.stdout + done.stderr).splitlines()
    found = (line.removeprefix("version:").strip() for line in said if line.startswith("version:"))
    return next(found, None)
