"""`llamactl up`: from nothing to a supervised engine that is ready."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamactl_cli import drift, resume, text, waiting
from llamactl_cli.connect import connect
from llamactl_cli.options import (
    ApiKeyFile,
    Engine,
    EngineArgs,
    Host,
    KvUnified,
    Model,
    NSeq,
    PerSlot,
    Port,
    RequestedCtx,
    Timeout,
    absolute,
    engine_options,
    one_size,
    total_tokens,
)
from llamactl_cli.provide import Provider, given_engine, given_model
from llamactl_cli.views import carried

if TYPE_CHECKING:
    from llamactl_supervisor.client import Client
    from llamactl_supervisor.config import Loaded
    from llamactl_supervisor.models import (
        EngineStatus,
        LifecycleResult,
        Operation,
        Status,
        UpRequest,
    )

    from llamactl_cli.output import Output

NEXT = (
    "llamactl status",
    "llamactl reconfigure --n-ctx 128k --n-seq 4",
    "llamactl logs -f",
    "llamactl down",
)


@dataclass(frozen=True)
class UpView:
    """The engine that is up, and what it took."""

    request: UpRequest
    result: LifecycleResult
    status: Status
    steps: list[str]
    daemon_started: bool
    resumed: bool
    total_s: float

    def text(self) -> str:
        """Return the facts and what to do next."""
        engine = self.status.engine
        geometry = None if engine is None else engine.geometry
        daemon = f"pid {self.status.daemon.pid}, {'started' if self.daemon_started else 'running'}"
        rows = [
            ("engine", self._engine()),
            ("url", None if engine is None else engine.url),
            ("model", self.request.spec.model),
            ("context", None if geometry is None else text.geometry(geometry)),
            ("usable", None if geometry is None else text.usable(geometry)),
            ("drift", drift.drift(self.status)),
            ("daemon", daemon),
            *(
                ("" if n else "carried", line)
                for n, line in enumerate(carried(self.result.carried))
            ),
            ("done", "; ".join(self.steps) or None),
            ("took", text.seconds(self.total_s)),
            *(("next" if n == 0 else "", command) for n, command in enumerate(NEXT)),
        ]
        return text.table(rows)

    def data(self) -> dict[str, Any]:
        """Return the facts."""
        engine: EngineStatus | None = self.status.engine
        geometry = None if engine is None else engine.geometry
        return self.result.model_dump(mode="json") | {
            "url": None if engine is None else engine.url,
            "socket": None if engine is None else engine.socket,
            "model": self.request.spec.model,
            "engine_path": self.request.engine_path,
            "geometry": None if geometry is None else geometry.model_dump(mode="json"),
            "drift": drift.fields(self.status),
            "daemon_pid": self.status.daemon.pid,
            "daemon_started": self.daemon_started,
            "resumed": self.resumed,
            "steps": self.steps,
            "total_s": round(self.total_s, 3),
        }

    def _engine(self) -> str:
        facts = ["already up" if self.result.outcome == "already_up" else "ready"]
        if self.result.pid is not None:
            facts.append(f"pid {self.result.pid}")
        if self.result.load_s is not None:
            facts.append(f"loaded in {text.seconds(self.result.load_s)}")
        return ", ".join(facts)


def up(
    ctx: typer.Context,
    engine_args: EngineArgs = None,
    model: Model = None,
    n_ctx: RequestedCtx = None,
    n_seq: NSeq = None,
    per_slot: PerSlot = None,
    kv_unified: KvUnified = None,
    tcp_port: Port = None,
    host: Host = None,
    api_key_file: ApiKeyFile = None,
    engine: Engine = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget the engine that was last asked for.")
    ] = False,
    timeout: Timeout = None,
) -> None:
    """Bring up a supervised engine and wait until it is ready.

    Without flags it is the engine that was last asked for, as `start` and `restart` have it, also
    after the end of daemon or machine; flags change what they name and leave the rest. Where none
    was asked for yet, or with --fresh, what no flag says is taken from the configuration
    (`llamactl config show`), else: SmolLM2 135M with 16384 tokens over 2 slots, on port 8080 of
    127.0.0.1. Builds and fetches what is missing, and starts the daemon where none runs. An engine
    that runs and is what is asked for is "already up" (exit 0); another one is refused and the
    differing fields are named (exit 5). A geometry that was set live since is kept, and told as
    `drift`, unless flags of this call say another.
    """
    from llamactl_supervisor.models import LifecycleResult

    output: Output = ctx.obj
    began = time.monotonic()
    one_size(n_ctx, per_slot)
    asked = {
        "engine.model": ("--model", absolute(model)),
        "engine.n_ctx": ("--n-ctx", n_ctx),
        "engine.n_seq": ("--n-seq", n_seq),
        "engine.kv_unified": ("--kv-unified", kv_unified),
        "engine.host": ("--host", host),
        "engine.port": ("--port", tcp_port),
        "engine.api_key_file": ("--api-key-file", absolute(api_key_file)),
        "engine.extra_args": ("--", engine_options(engine_args) or None),
        "engine.engine_path": ("--engine", absolute(engine)),
    }
    loaded = _configured(asked)
    provider = Provider(output)
    exact = any(flag is not None for flag in (n_ctx, n_seq, per_slot, kv_unified))
    with connect(output) as client:
        last, started = (None, False) if fresh else resume.last(client, loaded, output)
        if last is None:
            request = _whole(loaded, per_slot, provider)
            operation, now = _submit(client, request, output, exact=exact)
            started = started or now
        else:
            request, operation = _again(client, last, _given(loaded), per_slot, provider, exact)
            if not last.is_up:
                output.say(f"as last asked for: {resume.Last(request, is_up=True).text()}")
        result = waiting.follow(
            client, operation, output, LifecycleResult, doing="loading", timeout_s=timeout
        )
        status = client.status()
    total_s, steps, resumed = time.monotonic() - began, provider.steps, last is not None
    output.emit(UpView(request, result, status, steps, started, resumed, total_s))


def _configured(asked: dict[str, tuple[str, Any]]) -> Loaded:
    """Return what flags, environment and file ask for, in this order, proven to be there."""
    from llamactl_supervisor.config import Flag, load

    flags = {key: Flag(name, value) for key, (name, value) in asked.items() if value is not None}
    loaded = load(flags=flags)
    engine = loaded.config.engine
    if engine.model is not None:
        given_model(Path(engine.model))
    if engine.engine_path is not None:
        given_engine(Path(engine.engine_path), loaded.values["engine.engine_path"].source)
    if engine.api_key_file is not None:
        _key_file(Path(engine.api_key_file), loaded.values["engine.api_key_file"].source)
    return loaded


def _whole(loaded: Loaded, per_slot: int | None, provider: Provider) -> UpRequest:
    """Return the engine that flags and configuration ask for, and of the rest the default."""
    from llamactl_supervisor.models import EngineConfig

    configured = loaded.config.engine
    fields = configured.model_dump()
    if per_slot is not None:
        fields["n_ctx"] = total_tokens(per_slot, configured.n_seq)
    path = configured.engine_path or str(provider.build().path)
    model = configured.model or str(provider.default_model())
    request = EngineConfig.parse(fields | {"model": model, "engine_path": path}).request()
    assert request is not None
    return request


def _given(loaded: Loaded) -> dict[str, Any]:
    """Return the fields of [engine] that this call names, by flags or by its environment."""
    engine = loaded.config.engine
    return {
        name: getattr(engine, name)
        for name in type(engine).model_fields
        if loaded.values[f"engine.{name}"].source.startswith(("flag ", "env "))
    }


def _again(
    client: Client,
    last: resume.Last,
    given: dict[str, Any],
    per_slot: int | None,
    provider: Provider,
    exact: bool,
) -> tuple[UpRequest, Operation]:
    """Ask the daemon for the engine that was last asked for, with what is given now."""
    if per_slot is not None:
        n_seq = given.get("n_seq", last.request.spec.n_seq)
        given = given | {"n_ctx": total_tokens(per_slot, n_seq)}
    request = last.with_given(given)
    if not last.is_up:
        request = resume.provided(request, client.paths.cache, provider)
    if not given and request == last.request:
        return request, client.start()
    return request, client.up(request, exact=exact)


def _submit(
    client: Client, request: UpRequest, output: Output, *, exact: bool
) -> tuple[Operation, bool]:
    """Ask the daemon for the engine; start one where none answers."""
    from llamactl_supervisor.errors import DaemonUnreachableError

    try:
        return client.up(request, exact=exact), False
    except DaemonUnreachableError as exc:
        if "pid" in exc.details:
            raise
    resume.start_daemon(client, output)
    return client.up(request, exact=exact), True


def _key_file(path: Path, source: str) -> None:
    if not path.is_file():
        what = "is no file" if path.exists() else "is not there"
        raise typer.BadParameter(f"{path} {what}; it holds one key to a line", param_hint=source)
