"""Finds out what an apply comes to, before anything is touched: memory, conversations, time."""

from __future__ import annotations

import asyncio
import os
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_supervisor import (
    apply,
    args,
    carry,
    fates,
    launch,
    ledger,
    memory,
    ports,
    preflight,
    store,
)
from llamactl_supervisor.carry import Manifest, Taker
from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.models import AvoidedLine, CarriedLine, EngineLook, LoadLine, MemoryNeed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llamactl_supervisor import events as ev
    from llamactl_supervisor.engine import EngineClient
    from llamactl_supervisor.events import EngineProcess
    from llamactl_supervisor.memory import Available
    from llamactl_supervisor.models import (
        ApplyPlan,
        Fate,
        LedgerLine,
        PlanField,
        ReconfigureRequest,
        UpRequest,
    )
    from llamactl_supervisor.option_table import MemoryAnswer
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.spec import EngineSpec

LINES_MAX = 200
"""Lines of the ledger from which is told how long something takes."""
MIB = 2**20
CEILINGS = {"--page-ram-bytes": 1, "--ctx-checkpoints-bytes": 1, "--cache-ram": MIB}
"""Options that say how much more memory the engine may take while it works, and their units."""
SMALLER = "a smaller n_ctx or another model"
ADDRESS = frozenset(["--host", "--port"])
PROMPT_CACHE = "what only the prompt cache holds (--cache-ram) is not carried over: prefilled again"


async def plan(
    effect: ev.PlanApply, paths: Paths, client: Callable[[EngineProcess], EngineClient]
) -> ApplyPlan:
    """Return the whole plan.

    Raises `apply_refused` where it takes a relaunch and none is wanted, or one to an address that
    cannot be had, `insufficient_memory` with both numbers, what the engine says against a change
    of its geometry, and what its binary says against the command line.
    """
    command, found, process = effect.command, effect.plan, effect.process
    if found.action in ("relaunch", "start") and command.live_only:
        raise _not_live(found.reasons)
    if found.action == "relaunch" and any(each.field in ADDRESS for each in found.reasons):
        await _free(command.request, process)
    if found.action == "none":
        return found
    seen = None if process is None else await _look(client(process))
    if found.action == "reconfigure" and process is not None and not _sleeps(seen):
        change = apply.change(command, found, dry_run=True)
        known = await _live(change, client(process), seen)
    else:
        known = await _load(effect, paths, seen)
    expected_s = None
    if found.action != "store":
        expected_s = await _expected(paths, effect, loads=_sleeps(seen))
    return found.model_copy(update=known | {"expected_s": expected_s})


@dataclass(frozen=True)
class _Seen:
    """What an engine holds, and whether it can be asked to be quiet and write that down."""

    look: EngineLook
    can_be_quiet: bool


async def _look(client: EngineClient) -> _Seen | LlamactlError:
    """Return what the engine holds, or why that cannot be found out; a sleeping one sleeps on."""
    try:
        return _Seen(await client.look(), (await client.props()).is_quiet is not None)
    except LlamactlError as exc:
        return exc


def _sleeps(seen: _Seen | LlamactlError | None) -> bool:
    return isinstance(seen, _Seen) and seen.look.asleep


async def _live(
    change: ReconfigureRequest, client: EngineClient, seen: _Seen | LlamactlError | None
) -> dict[str, object]:
    """Return what the engine says that the change comes to."""
    there = await asyncio.to_thread(memory.available)
    try:
        receipt = await client.reconfigure(change)
    except LlamactlError as exc:
        needed = exc.details.get("bytes_needed")
        if exc.code != Code.INSUFFICIENT_MEMORY or there is None or not isinstance(needed, int):
            raise
        if needed <= there.n_bytes:  # another bound than ours, which the engine names
            raise
        raise _insufficient(needed, there.n_bytes, there.limit, hint=SMALLER) from exc
    need = _need(sum(receipt.bytes_needed.values()), there)
    pages = seen.look.pages if isinstance(seen, _Seen) else ()
    return {"conversations": fates.live(receipt, pages), "memory": need}


async def _load(
    effect: ev.PlanApply, paths: Paths, seen: _Seen | LlamactlError | None
) -> dict[str, object]:
    """Return what it comes to where another process loads weights, or one that wakes."""
    command, process = effect.command, effect.process
    ends = None if process is None else process.engine.pid
    paged = await asyncio.to_thread(_paged, effect, paths, seen)
    need, answer, notes = await asyncio.to_thread(_memory, command, ends, paths, paged)
    if effect.plan.action == "reconfigure":
        assert isinstance(seen, _Seen)
        notes = (*notes, "the engine sleeps: the change wakes it, and loads its weights")
        return {"conversations": fates.stay(seen.look.pages), "memory": need, "notes": notes}
    running = None if process is None else effect.running_spec
    if running is not None and _given(running, "--cache-ram") != "0":
        notes = (*notes, PROMPT_CACHE)
    held, more = await asyncio.to_thread(_held, effect, paths, seen, answer)
    return {"conversations": held, "memory": need, "notes": (*notes, *more)}


def _paged(effect: ev.PlanApply, paths: Paths, seen: _Seen | LlamactlError | None) -> int:
    """Return the bytes of the pages that come back into the next engine, beside its ceilings."""
    command = effect.command
    if "--page-ram-bytes" in command.spec.options:
        return 0
    taker = _taker(command, paths)
    in_files = store.peek_at(paths.carry_file, Manifest).conversations
    found = sum(
        each.n_bytes
        for each in in_files
        if each.page is not None and each.into is None and taker.refusal(each) is None
    )
    other = any(each.field.startswith(fates.IDENTITY) for each in effect.plan.reasons)
    if isinstance(seen, _Seen) and (not other or effect.plan.action == "reconfigure"):
        found += sum(page.n_bytes for page in seen.look.pages)
    return found


async def _free(request: UpRequest, process: EngineProcess | None) -> None:
    """Raise why the engine could not have its address. A run's engine has none of its own."""
    if request.context is not None:
        return
    try:
        await ports.check_free(request.spec.host, request.spec.port)
    except LlamactlError as exc:
        if process is None or exc.details.get("pid") != process.engine.pid:
            raise preflight.apply_refused(exc) from exc


def _not_live(reasons: Sequence[PlanField]) -> LlamactlError:
    told = [f"{each.field} is {_told(each.before)}, to be {_told(each.after)}" for each in reasons]
    return error(
        Code.APPLY_REFUSED,
        f"it is not live: {'; '.join(told) or 'the engine does not run'}",
        hint="without --live-only the engine is relaunched for it",
        details={"reasons": [each.model_dump(mode="json") for each in reasons]},
    )


def _told(value: object) -> str:
    return "not given" if value is None else str(value)


def _held(
    effect: ev.PlanApply,
    paths: Paths,
    seen: _Seen | LlamactlError | None,
    answer: MemoryAnswer | None,
) -> tuple[tuple[Fate, ...], tuple[str, ...]]:
    """Return what becomes of what the engine and files hold, and what is not known of that."""
    in_files = store.peek_at(paths.carry_file, Manifest).conversations
    to = _next(effect, paths, answer)
    if seen is None or isinstance(seen, LlamactlError):
        why = () if seen is None else (f"what the engine holds is not known: {seen.message}",)
        return fates.relaunched((), in_files, {}, to), why
    look = seen.look
    assert effect.process is not None
    assert effect.running is not None
    slots = [slot for slot in look.slots or () if slot.n_prompt_tokens]
    held = carry.held(
        slots,
        look.pages,
        instance=effect.process.instance_id,
        engine=Taker(str(launch.pages_dir(effect.running, paths)), effect.running.spec.model),
    )
    notes: tuple[str, ...] = ()
    if look.asleep:
        notes = ("the engine sleeps: its slots hold nothing, and it is not woken",)
    elif look.slots is None:
        why_not = "they do not say" if look.problem is None else look.problem.message
        notes = (f"what the slots hold is not known: {why_not}",)
    if not seen.can_be_quiet:
        old = "the engine that runs is of a build that cannot write it down before its end"
        return (*fates.lost(held, old), *fates.relaunched((), in_files, {}, to)), notes
    cut = f"its request is ended if it takes longer than {effect.drain_s:g} s"
    busy = {slot.id: cut for slot in slots if slot.is_processing and not slot.parked}
    return fates.relaunched(held, in_files, busy, to), notes


def _next(effect: ev.PlanApply, paths: Paths, answer: MemoryAnswer | None) -> fates.Next:
    """Return what the next engine is to conversations."""
    request, spec = effect.command.request, effect.command.spec
    n_ctx = None if answer is None else answer.n_ctx
    if n_ctx is None and isinstance(spec.n_ctx, int):
        n_ctx = spec.n_ctx
    room = None if n_ctx is None else fates.window(n_ctx, spec.n_seq, is_unified=spec.kv_unified)
    return fates.Next(
        n_seq=spec.n_seq,
        window=room,
        is_unified=spec.kv_unified,
        taker=_taker(effect.command, paths),
        takes_files=preflight.can_be_quiet(request, None, paths, os.environ),
        reasons=effect.plan.reasons,
    )


def _taker(command: ev.Apply, paths: Paths) -> Taker:
    """Return which conversations the engine takes that is applied."""
    model, spec = command.request.spec.model, command.spec
    directory = str(launch.pages_dir(command.request, paths))
    return Taker(directory, model, spec.files.get(model), fates.cache_types(spec))


def _memory(
    command: ev.Apply, ends: int | None, paths: Paths, paged: int
) -> tuple[MemoryNeed | None, MemoryAnswer | None, tuple[str, ...]]:
    """Return what the engine would take of host memory and what there is; refuse what is less.

    `paged` bytes of pages are brought back into it. Returned is the engine's own answer too, and
    what could not be found out.
    """
    request = command.request
    argv = preflight.argv(request, None, paths)
    env = preflight.environment(request, paths, os.environ)
    try:
        answer = args.memory(argv, env, preflight.directory(request))
    except LlamactlError as exc:
        if exc.code != Code.NOT_SUPPORTED:
            raise preflight.apply_refused(exc) from exc
        return None, None, ("memory was not checked: the engine does not say what it needs",)
    devices = answer.devices
    needed = sum(each.n_bytes for each in devices if each.is_host)
    needed += _ceilings(command.spec) + paged
    notes = tuple(f"memory for {name} is not counted" for name in answer.left_out)
    there = memory.available(ends)
    need = _need(needed, there)
    if command.overcommit:
        return need, answer, notes
    if there is not None and needed > there.n_bytes:
        raise _insufficient(needed, there.n_bytes, there.limit)
    for each in devices:
        if not each.is_host and each.n_bytes > each.total:
            raise _insufficient(each.n_bytes, each.total, f"the memory of {each.name}")
    return need, answer, notes


def _need(needed: int, there: Available | None) -> MemoryNeed:
    return MemoryNeed(
        needed_bytes=needed,
        available_bytes=None if there is None else there.n_bytes,
        limit="not known" if there is None else there.limit,
    )


def _insufficient(
    needed: int,
    there: int,
    limit: str,
    hint: str = f"{SMALLER}; --overcommit goes ahead all the same",
) -> LlamactlError:
    return error(
        Code.INSUFFICIENT_MEMORY,
        f"the engine would not fit ({-(-needed // MIB)} MiB needed, {there // MIB} MiB available: "
        f"{limit})",
        hint=hint,
        details={"bytes_needed": needed, "bytes_available": there, "limit": limit},
    )


def _ceilings(spec: EngineSpec) -> int:
    """Return what the engine was given leave to take beside its contexts."""
    found = 0
    for name, unit in CEILINGS.items():
        given = _given(spec, name)
        if given is not None and given.isdigit():
            found += int(given) * unit
    return found


def _given(spec: EngineSpec, option: str) -> str | None:
    """Return the value that an engine is given for this option, by whatever way; the last wins."""
    values = [one[-1] for one in spec.options.get(option, ()) if one]
    return values[-1] if values else None


async def _expected(paths: Paths, effect: ev.PlanApply, *, loads: bool) -> float | None:
    """Return how long nothing is served, the median of what it took before; None: it never was.

    `loads`: a live change that wakes the engine.
    """
    lines = await asyncio.to_thread(ledger.recent, paths.ledger_file, LINES_MAX)
    model, action = effect.command.request.spec.model, effect.plan.action
    if action == "reconfigure" and not loads:
        pauses = (line for line in lines if isinstance(line, AvoidedLine))
        return _median([each.pause_ms / 1000 for each in pauses if each.previous != each.geometry])
    load_s = _median([took for line in lines if (took := _load_s(line, model)) is not None])
    if load_s is None or action != "relaunch":
        return load_s
    carried = [line for line in lines if isinstance(line, CarriedLine)]
    ways = (_median([line.quiet_s for line in carried if line.way == way]) for way in ("out", "in"))
    return load_s + sum(each for each in ways if each is not None)


def _load_s(line: LedgerLine, model: str) -> float | None:
    wanted = isinstance(line, LoadLine) and line.loaded and line.model == model
    return line.load_s if isinstance(line, LoadLine) and wanted else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
