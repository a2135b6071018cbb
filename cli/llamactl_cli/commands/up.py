"""`llamactl up`: from nothing to a supervised engine that is ready."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamactl_cli import session, text, waiting
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
        EngineRequest,
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
    (exit 5). Without -c and -np: 16384 tokens over 2 slots.
    """
    from llamactl_supervisor.client import ControlClient
    from llamactl_supervisor.models import DEFAULT_N_SEQ, LifecycleResult, UpRequest

    output: Output = ctx.obj
    began = time.monotonic()
    one_size(n_ctx, per_slot)
    if per_slot is not None:
        n_ctx = total_tokens(per_slot, n_seq or DEFAULT_N_SEQ)
    asked = {
        "model": None if model is None else str(given_model(model)),
        "n_ctx": n_ctx,
        "n_seq": n_seq,
        "kv_unified": kv_unified,
        "host": host,
        "port": tcp_port,
        "api_key_file": None if api_key_file is None else str(_key_file(api_key_file)),
        "extra_args": _options(engine_args or []),
    }
    spec = _spec({name: value for name, value in asked.items() if value is not None})
    provider = Provider(output)
    path = provider.build().path if engine is None else given_engine(engine)
    if model is None:
        spec = spec.model_copy(update={"model": str(provider.default_model())})
    request = UpRequest(spec=spec, engine_path=str(path))
    with ControlClient() as client:
        operation, started = _submit(client, request, output)
        result = waiting.follow(
            client, operation, output, LifecycleResult, doing="loading", timeout_s=timeout
        )
        status = client.status()
    total_s = time.monotonic() - began
    output.emit(UpView(request, result, status, provider.steps, started, total_s))


def _spec(asked: dict[str, Any]) -> EngineRequest:
    """Return the request, proven before anything is built; the default model comes later."""
    from llamactl_supervisor.models import EngineRequest

    return EngineRequest.parse({"model": "/"} | asked)


def _submit(client: ControlClient, request: UpRequest, output: Output) -> tuple[Operation, bool]:
    """Ask the daemon for the engine; start one where none answers."""
    from llamactl_supervisor.client import spawn_daemon
    from llamactl_supervisor.errors import DaemonUnreachableError

    try:
        return client.up(request), False
    except DaemonUnreachableError:
        output.say("starting the daemon")
        if user := session.ends_at_logout(client.paths):
            output.say(f"its socket goes at your last logout: loginctl enable-linger {user}")
    spawn_daemon(client.paths)
    return client.up(request), True


def _options(args: list[str]) -> list[str]:
    """Return the engine's further arguments; a lone word is a slip, llama-server takes none."""
    if args and not args[0].startswith("-"):
        message = f"{args[0]!r} is no option of llama-server; a model is given with --model"
        raise typer.BadParameter(message, param_hint="-- ARGS")
    return args


def _key_file(path: Path) -> Path:
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}", param_hint="--api-key-file")
    return path.absolute()
