"""`llamactl apply`: another engine than the one that runs, live where that is possible."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamactl_cli import text, waiting
from llamactl_cli.connect import connect
from llamactl_cli.options import (
    ApiKeyFile,
    DryRun,
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
from llamactl_cli.views import LifecycleView, ReceiptView, end

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamactl_supervisor.client import Client
    from llamactl_supervisor.models import (
        ApplyPlan,
        ApplyRequest,
        ApplyResult,
        EngineConfig,
        PlanField,
    )

    from llamactl_cli.output import Output

AcceptLoss = Annotated[
    bool, typer.Option("--accept-loss", help="Relaunch even if a conversation cannot be kept.")
]
Overcommit = Annotated[
    bool, typer.Option("--overcommit", help="Relaunch even where memory does not suffice.")
]
_ACTIONS = {
    "none": "nothing to do: the engine is like that already",
    "reconfigure": "a live change on the loaded weights",
    "relaunch": "a relaunch: the weights are loaded again",
    "start": "a start: the engine does not run",
    "store": "kept for the next start: the engine is stopped",
}


@dataclass(frozen=True)
class ApplyView:
    """The plan, and what came of it."""

    result: ApplyResult
    dry_run: bool = False
    told: bool = False
    """The plan was shown when it was known."""

    def text(self) -> str:
        """Return the plan, then the receipt of the engine or what its start came to."""
        result = self.result
        parts = ["" if self.told else plan_text(result.plan, dry_run=self.dry_run)]
        if result.with_operation is not None:
            parts.append(f"carried out with a newer apply, operation {result.with_operation}")
        if result.receipt is not None:
            parts.append(ReceiptView(result.receipt).text())
        if result.lifecycle is not None:
            parts.append(LifecycleView(result.lifecycle).text())
        return "\n\n".join(parts).removeprefix("\n")

    def data(self) -> dict[str, Any]:
        """Return the result as the daemon gave it."""
        return self.result.model_dump(mode="json")


def apply(
    ctx: typer.Context,
    engine_args: EngineArgs = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="The whole engine, as [engine] of the configuration; `-` is stdin.",
        ),
    ] = None,
    model: Model = None,
    n_ctx: RequestedCtx = None,
    n_seq: NSeq = None,
    per_slot: PerSlot = None,
    kv_unified: KvUnified = None,
    tcp_port: Port = None,
    host: Host = None,
    api_key_file: ApiKeyFile = None,
    engine: Engine = None,
    dry_run: DryRun = False,
    live_only: Annotated[
        bool, typer.Option("--live-only", help="Rather refuse than relaunch.")
    ] = False,
    overcommit: Overcommit = False,
    accept_loss: AcceptLoss = False,
    timeout: Timeout = None,
) -> None:
    """Bring the engine to what is wanted: live where that is possible, else by a relaunch.

    Prints the plan. Flags change what they name and leave the rest (ARGS take the place of all
    further options); -f FILE is the whole engine: what it leaves out has its default. Either is
    what is wanted from then on. What cannot be is refused before anything is touched (exit 5).
    """
    from llamactl_supervisor.models import ApplyRequest

    output: Output = ctx.obj
    one_size(n_ctx, per_slot)
    given = {
        "model": absolute(model),
        "n_ctx": n_ctx,
        "n_seq": n_seq,
        "kv_unified": kv_unified,
        "host": host,
        "port": tcp_port,
        "api_key_file": absolute(api_key_file),
        "extra_args": tuple(engine_options(engine_args)) or None,
        "engine_path": absolute(engine),
    }
    flags = {name: value for name, value in given.items() if value is not None}
    with connect(output) as client:
        if per_slot is not None:
            flags["n_ctx"] = total_tokens(per_slot, n_seq or _n_seq(client))
        request = ApplyRequest(
            engine=_wanted(file, flags, output),
            replace=file is not None,
            live_only=live_only,
            dry_run=dry_run,
            overcommit=overcommit,
            accept_loss=accept_loss,
        )
        view = carry_out(client, request, output, timeout)
    output.emit(view)
    end(view.result.lifecycle, accept_loss=accept_loss)


def carry_out(
    client: Client, request: ApplyRequest, output: Output, timeout_s: float | None
) -> ApplyView:
    """Ask the daemon for it, show a person the plan once it is known, and return the outcome."""
    from llamactl_supervisor.models import ApplyResult

    doing, dry_run = "making the plan" if request.dry_run else "applying", request.dry_run
    began, told = time.monotonic(), False
    begun = client.apply(request)
    if not (dry_run or output.as_json):
        begun = waiting.planned(client, begun, output, timeout_s=timeout_s)
        if begun.plan is not None and begun.result is None:
            output.line(plan_text(begun.plan, dry_run=False))
            told = True
        if timeout_s is not None:
            timeout_s = max(timeout_s - (time.monotonic() - began), 0.0)
    result = waiting.follow(client, begun, output, ApplyResult, doing=doing, timeout_s=timeout_s)
    return ApplyView(result, dry_run, told)


def _wanted(file: Path | None, flags: dict[str, Any], output: Output) -> EngineConfig:
    from llamactl_supervisor.config import load_engine
    from llamactl_supervisor.errors import Code, error
    from llamactl_supervisor.models import EngineConfig

    if file is not None and flags:
        message = "is the whole engine: it takes no flags beside it"
        raise typer.BadParameter(message, param_hint="--file")
    if file is not None:
        engine, others = load_engine(file)
        if others:
            left = ", ".join(f"[{name}]" for name in others)
            output.say(f"{left} is left out: `llamactl reload` takes the rest of the configuration")
        return engine
    if not flags:
        hint = "give -f FILE, or flags as for `llamactl up`"
        raise error(Code.INVALID_REQUEST, "nothing to apply was given", hint=hint)
    return EngineConfig.parse(flags)


def _n_seq(client: Client) -> int:
    """Return how many slots the engine is to have by what is wanted now."""
    from llamactl_supervisor.models import DEFAULT_N_SEQ

    status = client.status()
    if status.override is not None:
        return status.override.n_seq
    return DEFAULT_N_SEQ if status.desired is None else status.desired.spec.n_seq


def plan_text(plan: ApplyPlan, *, dry_run: bool) -> str:
    """Return what an apply comes to, as a person reads it."""
    return text.table(_rows(plan, dry_run=dry_run))


def _rows(plan: ApplyPlan, *, dry_run: bool) -> Iterator[tuple[str, str | None]]:
    yield ("dry run" if dry_run else "plan"), _ACTIONS[plan.action]
    for reason in plan.reasons:
        yield "relaunch for", f"{_change(reason)} ({reason.kind})"
    for change in plan.changes:
        yield ("with it" if plan.reasons else "live"), _change(change)
    for held in plan.conversations:
        tokens = "" if held.n_tokens is None else f"{text.count(held.n_tokens, 'token')}, "
        yield text.printable(held.what), f"{tokens}{held.fate}"
    if (memory := plan.memory) is not None:
        there = memory.available_bytes
        of = "" if there is None else f", {text.size(there)} available ({memory.limit})"
        yield "memory", f"{text.size(memory.needed_bytes)} needed{of}"
    yield "expected", _expected(plan)
    for note in plan.notes:
        yield "note", note


def _change(field: PlanField) -> str:
    return f"{field.field}: {_shown(field.before)} -> {_shown(field.after)}"


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    return text.printable(value) if isinstance(value, str) else text.value(value)


def _expected(plan: ApplyPlan) -> str | None:
    if plan.expected_s is None:
        return None
    took = f"{plan.expected_s * 1000:.0f} ms"
    if plan.expected_s >= 1:
        took = text.seconds(plan.expected_s)
    return f"a {'load' if plan.action == 'start' else 'pause'} of about {took}, as before"
