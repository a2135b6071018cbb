"""`llamactl up`: from nothing to a supervised engine that is ready."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamactl_cli import drift, session, text, waiting
from llamactl_cli.connect import connect
from llamactl_cli.options import (
    KvUnified,
    NCtx,
    NSeq,
    PerSlot,
    Timeout,
    one_size,
    port,
    total_tokens,
)
from llamactl_cli.provide import Provider, given_engine, given_model

if TYPE_CHECKING:
    from llamactl_supervisor.client import ControlClient
    from llamactl_supervisor.models import (
        EngineConfig,
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
    engine_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS]", help="After `--`: further llama-server options."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", metavar="PATH", help="A GGUF file. [default: SmolLM2 135M]"),
    ] = None,
    n_ctx: NCtx = None,
    n_seq: NSeq = None,
    per_slot: PerSlot = None,
    kv_unified: KvUnified = None,
    tcp_port: Annotated[
        int | None,
        typer.Option(
            "--port", parser=port, metavar="PORT", help="For the clients. [default: 8080]"
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Where clients may come from; IPv4. [default: 127.0.0.1]",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", metavar="PATH", help="Keys that clients must present."),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option("--engine", metavar="PATH", help="This llama-server; nothing is built."),
    ] = None,
    timeout: Timeout = None,
) -> None:
    """Bring up a supervised engine and wait until it is ready.

    Builds and fetches what is missing, and starts the daemon where none runs. The same request
    again is "already up" (exit 0); another one is refused and the differing fields are named
    (exit 5). A geometry that was set live since is kept, and told as `drift`, unless flags of this
    call say another. What no flag says is taken from the configuration (`llamactl config show`),
    else: 16384 tokens over 2 slots.
    """
    from llamactl_supervisor.models import EngineRequest, LifecycleResult, UpRequest

    output: Output = ctx.obj
    began = time.monotonic()
    one_size(n_ctx, per_slot)
    asked = {
        "engine.model": ("--model", _absolute(model)),
        "engine.n_ctx": ("--n-ctx", n_ctx),
        "engine.n_seq": ("--n-seq", n_seq),
        "engine.kv_unified": ("--kv-unified", kv_unified),
        "engine.host": ("--host", host),
        "engine.port": ("--port", tcp_port),
        "engine.api_key_file": ("--api-key-file", _absolute(api_key_file)),
        "engine.extra_args": ("--", _options(engine_args or []) or None),
        "engine.engine_path": ("--engine", _absolute(engine)),
    }
    configured = _configured(asked, per_slot)
    provider = Provider(output)
    path = configured.engine_path or str(provider.build().path)
    model_path = configured.model or str(provider.default_model())
    fields = configured.model_dump(exclude={"engine_path"}) | {"model": model_path}
    request = UpRequest(spec=EngineRequest.parse(fields), engine_path=path)
    exact = any(flag is not None for flag in (n_ctx, n_seq, per_slot, kv_unified))
    with connect(output) as client:
        operation, started = _submit(client, request, output, exact=exact)
        result = waiting.follow(
            client, operation, output, LifecycleResult, doing="loading", timeout_s=timeout
        )
        status = client.status()
    total_s = time.monotonic() - began
    output.emit(UpView(request, result, status, provider.steps, started, total_s))


def _configured(asked: dict[str, tuple[str, Any]], per_slot: int | None) -> EngineConfig:
    """Return the engine that flags, environment and file ask for, in this order."""
    from llamactl_supervisor.config import Flag, load

    flags = {key: Flag(name, value) for key, (name, value) in asked.items() if value is not None}
    if per_slot is not None:
        n_ctx = total_tokens(per_slot, load(flags=flags).config.engine.n_seq)
        flags["engine.n_ctx"] = Flag("--per-slot", n_ctx)
    loaded = load(flags=flags)
    engine = loaded.config.engine
    if engine.model is not None:
        given_model(Path(engine.model))
    if engine.engine_path is not None:
        given_engine(Path(engine.engine_path), loaded.values["engine.engine_path"].source)
    if engine.api_key_file is not None:
        _key_file(Path(engine.api_key_file), loaded.values["engine.api_key_file"].source)
    return engine


def _submit(
    client: ControlClient, request: UpRequest, output: Output, *, exact: bool
) -> tuple[Operation, bool]:
    """Ask the daemon for the engine; start one where none answers."""
    from llamactl_supervisor.client import spawn_daemon
    from llamactl_supervisor.errors import DaemonUnreachableError

    try:
        return client.up(request, exact=exact), False
    except DaemonUnreachableError as exc:
        if "pid" in exc.details:
            raise
        output.say("starting the daemon")
        if user := session.ends_at_logout(client.paths):
            output.say(f"its socket goes at your last logout: loginctl enable-linger {user}")
    spawn_daemon(client.paths)
    return client.up(request, exact=exact), True


def _options(args: list[str]) -> list[str]:
    """Return the engine's further arguments; a lone word is a slip, llama-server takes none."""
    if args and not args[0].startswith("-"):
        message = f"{args[0]!r} is no option of llama-server; a model is given with --model"
        raise typer.BadParameter(message, param_hint="-- ARGS")
    return args


def _key_file(path: Path, source: str) -> None:
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}", param_hint=source)


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
