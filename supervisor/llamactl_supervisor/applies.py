"""The applies that wait: which is next, on top of what, and which are carried out together. Pure.

Each that can be is in force in the end, on top of those before it: what is in force is what those
ask for, one after another, that are told as succeeded. One that fails has no part in it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor.apply import at_rest, begin, comes_to
from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.launch import live_spec
from llamactl_supervisor.models import EngineConfig, Problem
from llamactl_supervisor.reload import WHAT_RUNS
from llamactl_supervisor.snapshot import Pending, Snapshot, Step

if TYPE_CHECKING:
    from llamactl_supervisor.models import ApplyPlan, ApplyRequest, UpRequest

APPLIES_MAX = 16
"""Most applies that wait at once: each may still have to be the one that is carried out."""
LOADS = frozenset({"relaunch", "start"})
"""What an apply comes to that loads the weights."""
SUPERSEDED = Problem(
    code=Code.SUPERSEDED,
    message="newer applies set all that this one asks for, before it began: nothing of it is "
    "in force",
)


def newest(snapshot: Snapshot) -> UpRequest | None:
    """Return what is wanted once all is done that was asked for: the next apply is on top of it.

    That is what the newest apply that waits asks for, or the one that is carried out, else what was
    asked for last, with the geometry that was set live.
    """
    if snapshot.pending is not None:
        return snapshot.pending.waiting[-1].request
    if snapshot.desired is not None and snapshot.applying is not None:
        return snapshot.applying.command.request
    return _wanted(snapshot)


def merged(before: UpRequest | None, asked: ApplyRequest) -> UpRequest:
    """Return the whole request: what is asked for, on top of `before`.

    Raises `no_spec` where no engine is known.
    """
    kept: dict[str, object] = {} if before is None else EngineConfig.of(before).model_dump()
    if asked.replace:
        kept = {name: value for name, value in kept.items() if name in WHAT_RUNS}
    request = EngineConfig.parse(kept | _given(asked)).request()
    if request is not None and before is not None:
        request = request.model_copy(update={"context": before.context})
    if request is None:
        raise error(
            Code.NO_SPEC,
            "no engine was asked for yet, and what is applied names no model or no llama-server",
            hint="use `llamactl up`",
        )
    return request


def _given(asked: ApplyRequest) -> dict[str, object]:
    """Return the fields that are asked for; nobody asks for no model."""
    named = asked.engine.model_dump(exclude_unset=True)
    return {n: value for n, value in named.items() if value is not None or n not in WHAT_RUNS}


def ask(snapshot: Snapshot, command: ev.Apply) -> Step:
    """Let this apply wait; each of those that wait already may still be carried out."""
    pending = snapshot.pending or Pending()
    if len(pending.waiting) >= APPLIES_MAX:
        problem = Problem(
            code=Code.OPERATION_IN_PROGRESS,
            message=f"{APPLIES_MAX} applies wait for their turn",
            hint="wait for the operation that runs: `llamactl status`",
        )
        return snapshot, (ev.Reject(command.operation, problem),)
    return replace(snapshot, pending=replace(pending, commands=(*pending.commands, command))), ()


def waits(snapshot: Snapshot, operation: str) -> bool:
    """Say whether this apply waits for its turn."""
    pending = snapshot.pending
    return pending is not None and operation in {each.operation for each in pending.waiting}


def drop(snapshot: Snapshot, operation: str, problem: Problem) -> Step:
    """End one of the applies that wait; what is on top of what has been judged is so no more."""
    pending = snapshot.pending
    assert pending is not None
    commands = tuple(each for each in pending.commands if each.operation != operation)
    if commands == pending.commands:
        left = Pending(tuple(each for each in pending.waiting if each.operation != operation))
    else:
        asked = pending.asked and pending.commands[0].operation != operation
        left = replace(pending, commands=commands, asked=asked)
    return replace(snapshot, pending=left if left.waiting else None), (ev.Fail(operation, problem),)


def give_up(snapshot: Snapshot, problem: Problem) -> Step:
    """End all applies that wait."""
    waiting = () if snapshot.pending is None else snapshot.pending.waiting
    return replace(snapshot, pending=None), tuple(ev.Fail(e.operation, problem) for e in waiting)


def go_on(snapshot: Snapshot) -> Step:
    """Have it found out what the next apply comes to, once nothing else is under way.

    What it is on top of may be another by now than when it came: one before it was refused, say.
    """
    pending = snapshot.pending
    leaving = snapshot.leaving or snapshot.closing
    if pending is None or pending.asked or leaving or not at_rest(snapshot):
        return snapshot, ()
    if not pending.commands:  # what the best of them comes to is not what it was
        pending = Pending(pending.waiting)
    command = pending.commands[0]
    asked = replace(snapshot, pending=replace(pending, asked=True))
    before = _wanted(snapshot) if pending.best is None else pending.best[0].request
    try:
        request = command.request if command.asked is None else merged(before, command.asked)
    except LlamactlError as exc:
        after, told = drop(asked, command.operation, Problem.of(exc))
        again, more = go_on(after)
        return again, (*told, *more)
    if request != command.request:
        return asked, (ev.Rebase(command.operation, request),)
    return asked, (to_plan(snapshot, command),)


def to_plan(snapshot: Snapshot, command: ev.Apply) -> ev.PlanApply:
    """Return what finds out what an apply comes to."""
    found, drain_s = comes_to(snapshot, command.spec), snapshot.settings.drain_s
    known = (snapshot.process, snapshot.running, snapshot.running_spec)
    return ev.PlanApply(command, found, *known, drain_s)


def rebased(snapshot: Snapshot, event: ev.Rebased) -> Step:
    """Go on with what is asked for on top of what is wanted now."""
    pending = _judging(snapshot, event.operation)
    if pending is None:
        return snapshot, ()
    if isinstance(event.spec, Problem):
        return drop(snapshot, event.operation, event.spec)
    command = replace(pending.commands[0], request=event.request, spec=event.spec)
    commands = (command, *pending.commands[1:])
    return replace(snapshot, pending=replace(pending, commands=commands, asked=False)), ()


def _judging(snapshot: Snapshot, operation: str) -> Pending | None:
    """Return the applies that wait, if it is this one of which something is being found out."""
    pending = snapshot.pending
    asked = pending is not None and pending.asked and pending.commands[0].operation == operation
    return pending if asked else None


def planned(snapshot: Snapshot, event: ev.Planned, now: float) -> Step:
    """Take in what an apply comes to; carry out all that can be once that is known of each.

    What was found out of a state that is gone is found out again.
    """
    pending, found = _judging(snapshot, event.operation), event.plan
    if pending is None:
        return snapshot, ()
    command = pending.commands[0]
    told: tuple[ev.Effect, ...] = ()
    if isinstance(found, Problem):
        if _for_the_best(snapshot, pending):
            return _begin(snapshot, replace(pending, asked=False), now)
        after, told = drop(snapshot, event.operation, found)
    elif not _still(snapshot, command, found):
        return replace(snapshot, pending=replace(pending, asked=False)), ()
    else:
        best = () if pending.best is None else (pending.best[0],)
        older = (*pending.older, *best)
        after = replace(snapshot, pending=Pending(pending.commands[1:], (command, found), older))
    left = after.pending
    if left is None or left.commands or left.best is None or not _still(after, *left.best):
        return after, told
    begun, effects = _begin(after, left, now)
    return begun, (*told, *effects)


def _for_the_best(snapshot: Snapshot, pending: Pending) -> bool:
    """Say whether one that is to be live only would be relaunched for one that it is on top of."""
    command, best = pending.commands[0], pending.best
    if best is None or not command.live_only or best[1].action not in LOADS:
        return False
    return _still(snapshot, *best) and comes_to(snapshot, command.spec).action in LOADS


def _begin(snapshot: Snapshot, pending: Pending, now: float) -> Step:
    """Carry out the best, and with it all that it is on top of and of which something is left."""
    assert pending.best is not None
    command, found = pending.best
    taken: tuple[ev.Apply, ...] = ()
    told: tuple[ev.Effect, ...] = ()
    set_since, config, lossy = _sets(command), command.config, command.accept_loss
    for each in reversed(pending.older):
        config = config or each.config
        if _sets(each) <= set_since:
            told = (ev.Fail(each.operation, SUPERSEDED), *told)
        else:
            taken, set_since = (each, *taken), set_since | _sets(each)
            lossy = lossy and each.accept_loss
    command = replace(command, config=config, accept_loss=lossy)
    waiting = Pending(pending.commands) if pending.commands else None
    begun, effects = begin(replace(snapshot, pending=waiting), command, found, now, taken)
    return begun, (*told, *effects)


def _sets(command: ev.Apply) -> frozenset[str]:
    """Return the fields of [engine] that are as this apply says, whatever they were before it."""
    if command.asked is None:
        return frozenset(EngineConfig.model_fields)
    others = EngineConfig.model_fields.keys() - WHAT_RUNS if command.asked.replace else ()
    return frozenset(_given(command.asked)).union(others)


def _still(snapshot: Snapshot, command: ev.Apply, found: ApplyPlan) -> bool:
    """Say whether an apply comes to what was found out."""
    return at_rest(snapshot) and _same(comes_to(snapshot, command.spec), found)


def _same(one: ApplyPlan, other: ApplyPlan) -> bool:
    return (one.action, one.reasons, one.changes) == (other.action, other.reasons, other.changes)


def _wanted(snapshot: Snapshot) -> UpRequest | None:
    """Return what was asked for last, with the geometry that was set live."""
    desired = snapshot.desired
    if desired is None:
        return None
    spec = live_spec(desired.spec, snapshot.override)
    return desired.model_copy(update={"spec": spec})
