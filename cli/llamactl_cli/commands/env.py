"""`llamactl env`: where everything is, as lines for a shell."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from llamactl_supervisor.errors import LlamactlError

from llamactl_cli.connect import connect, of_daemon

if TYPE_CHECKING:
    from llamactl_supervisor.config import Paths
    from llamactl_supervisor.models import EngineStatus

    from llamactl_cli.output import Output


@dataclass(frozen=True)
class EnvView:
    """Paths that exist without a daemon, and the addresses of its engine."""

    paths: Paths
    engine: EngineStatus | None

    def text(self) -> str:
        """Return lines for `eval`; another shell that has them asks the same daemon."""
        names = {
            "LLAMACTL_CACHE_DIR": self.paths.cache,
            "LLAMACTL_STATE_DIR": self.paths.state,
            "LLAMACTL_RUNTIME_DIR": self.paths.runtime,
            "LLAMACTL_CONTROL_SOCKET": self.paths.control_socket,
            "LLAMACTL_ENGINE_LOG": self.paths.engine_log,
            "LLAMACTL_DAEMON_LOG": self.paths.daemon_log,
        }
        addresses = {}
        if self.engine is not None:
            addresses = {
                "LLAMACTL_ENGINE_SOCKET": self.engine.socket,
                "LLAMACTL_ENGINE_URL": self.engine.url,
                "OPENAI_BASE_URL": f"{self.engine.url}/v1",
            }
        lines = (names | addresses).items()
        return "\n".join(f"export {name}={shlex.quote(str(value))}" for name, value in lines)

    def data(self) -> dict[str, Any]:
        """Return the same; what belongs to an engine is null without one."""
        return {
            "cache_dir": str(self.paths.cache),
            "state_dir": str(self.paths.state),
            "runtime_dir": str(self.paths.runtime),
            "control_socket": str(self.paths.control_socket),
            "engine_log": str(self.paths.engine_log),
            "daemon_log": str(self.paths.daemon_log),
            "engine_socket": None if self.engine is None else self.engine.socket,
            "engine_url": None if self.engine is None else self.engine.url,
            "openai_base_url": None if self.engine is None else f"{self.engine.url}/v1",
        }


def env(ctx: typer.Context) -> None:
    """Print sockets, logs and URLs as lines for a shell.

    For eval "$(llamactl env)". Needs no daemon, and tells of the one that runs; without an engine
    the URLs are left out.
    """
    output: Output = ctx.obj
    engine = None
    with connect(output) as client:
        paths = client.paths
        try:
            status = client.status()
        except LlamactlError as exc:
            output.say(exc.message)
        else:
            engine, paths = status.engine, of_daemon(paths, status.daemon)
        output.emit(EnvView(paths, engine), raw=True)
