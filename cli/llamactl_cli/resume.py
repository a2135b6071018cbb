"""The engine that was last asked for, which `up` goes on from; a daemon has it, or left it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamactl_cli import session, text, unit_start, waiting

if TYPE_CHECKING:
    from llamactl_supervisor.client import Client
    from llamactl_supervisor.config import Loaded
    from llamactl_supervisor.models import Status, UpRequest

    from llamactl_cli.output import Output
    from llamactl_cli.provide import Provider


@dataclass(frozen=True)
class Last:
    """What was last asked for, with the geometry that was set live; `is_up`: it runs, or loads."""

    request: UpRequest
    is_up: bool

    def with_given(self, given: dict[str, Any]) -> UpRequest:
        """Return it with the fields of [engine] that this call names."""
        from llamactl_supervisor.models import EngineConfig

        kept = EngineConfig.of(self.request).model_dump()
        asked = EngineConfig.parse(kept | given).request()
        assert asked is not None
        return asked

    def text(self) -> str:
        """Return what matters of it, on one line."""
        spec = self.request.spec
        size = spec.n_ctx if isinstance(spec.n_ctx, str) else text.count(spec.n_ctx, "token")
        slots = text.count(spec.n_seq, "slot")
        return f"{spec.model}, {size} over {slots}, port {spec.port} of {spec.host}"


def start_daemon(client: Client, output: Output) -> None:
    """Start a daemon where none answers: behind its installed socket, else one of our own."""
    from llamactl_supervisor.spawn import spawn_daemon

    output.say("starting the daemon")
    if unit_start.start_socket(client.paths, output):
        return
    if user := session.ends_at_logout(client.paths):
        output.say(f"its socket goes at your last logout: loginctl enable-linger {user}")
    spawn_daemon(client.paths)


def last(client: Client, loaded: Loaded, output: Output) -> tuple[Last | None, bool]:
    """Return what was last asked for, and whether a daemon was started to be asked.

    None where there is nothing to go on from: nothing was asked for yet, or by a `run` alone. Of
    an engine that is not up, what the configuration file says by now is a part of it.
    """
    from llamactl_supervisor import remains
    from llamactl_supervisor.errors import DaemonUnreachableError

    started = False
    try:
        status = client.status()
    except DaemonUnreachableError as exc:
        if "pid" in exc.details:
            raise
        if remains.desired(client.paths) is None and not remains.engine_pids(client.paths):
            return None, False
        start_daemon(client, output)
        status, started = client.status(), True
    found = _last(status)
    if found is None or found.is_up or status.config is None:
        return found, started
    if status.config.digest != loaded.digest:
        _reload(client, output)
        found = _last(client.status())
    return found, started


def provided(request: UpRequest, cache: Path, provider: Provider) -> UpRequest:
    """Return the request with what llamactl had built and fetched, where it is gone from there."""
    engine, model = Path(request.engine_path), Path(request.spec.model)
    if engine.is_relative_to(cache) and not engine.exists():
        request = request.model_copy(update={"engine_path": str(provider.build().path)})
    if model.is_relative_to(cache) and not model.exists():
        spec = request.spec.model_copy(update={"model": str(provider.default_model())})
        request = request.model_copy(update={"spec": spec})
    return request


def _last(status: Status) -> Last | None:
    from llamactl_supervisor.models import EngineState

    desired, live = status.desired, status.override
    if desired is None or desired.context is not None:
        return None
    if live is not None:
        desired = desired.model_copy(update={"spec": live.on(desired.spec)})
    down = {EngineState.STOPPED, EngineState.CRASHED, EngineState.FAILED}
    return Last(desired, is_up=status.state not in down)


def _reload(client: Client, output: Output) -> None:
    from llamactl_supervisor.models import ReloadResult

    doing = "reading the configuration again"
    waiting.follow(client, client.reload(), output, ReloadResult, doing=doing)
