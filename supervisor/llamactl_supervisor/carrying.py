"""The state machine's part in carrying conversations over: out before the TERM, in before READY."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor.errors import Code
from llamactl_supervisor.models import After, CarryFate, CarryReport, EngineState, Problem
from llamactl_supervisor.snapshot import (
    Carry,
    Snapshot,
    Step,
    carry_patience_s,
    served,
    terminate,
    write_out,
)

if TYPE_CHECKING:
    from llamactl_supervisor.models import CarriedConversation

LOSSES_MAX = 5
"""Most losses that are named in one line; the details have all."""


def goes_in(snapshot: Snapshot, facts: ev.EngineFacts) -> bool:
    """Say whether an engine that has become healthy waits for its conversations."""
    return facts.is_quiet is True and not served(snapshot)


def begin_in(snapshot: Snapshot, process: ev.EngineProcess, now: float) -> Step:
    """The engine has loaded and is quiet: bring back what files hold."""
    assert snapshot.running is not None
    carry = Carry("bringing back conversations", load_s=now - snapshot.load_began)
    asked = ev.CarryIn(snapshot.generation, process, snapshot.running)
    return replace(snapshot, carry=carry, deadline=now + carry_patience_s(snapshot)), (asked,)


def goes_on(snapshot: Snapshot) -> tuple[ev.CarryOff, ...]:
    """Return what has the engine serve whatever was begun with it."""
    assert snapshot.process is not None
    assert snapshot.running is not None
    return (ev.CarryOff(snapshot.process, snapshot.running),)


def moved(snapshot: Snapshot, event: ev.CarryMoved, now: float) -> Step:
    """It moves; what would be left if the engine ended now is known."""
    carry = snapshot.carry
    if carry is None:
        return snapshot, ()
    out = snapshot.state is EngineState.STOPPING
    waits = carry.waits and not event.is_drained
    return replace(
        snapshot,
        carry=replace(carry, progress=event.progress, waits=waits),
        carried=event.report if out else snapshot.carried,
        deadline=now + carry_patience_s(snapshot),
    ), ()


def ended_out(snapshot: Snapshot, report: CarryReport, now: float) -> Step:
    """All that can be kept is in files: TERM, unless more was asked for than can be."""
    carry = snapshot.carry
    if carry is None or snapshot.state is not EngineState.STOPPING:
        return snapshot, ()
    whole = not report.has_losses
    if not whole and not carry.may_lose:
        if snapshot.after is After.REST:  # what began as a restart is a stop now
            return write_out(snapshot, now, may_lose=True, waits=carry.waits)
        return _refused(snapshot, report, now)
    ended = replace(snapshot, carry=None, carried=_worth_telling(report))
    after, effects = terminate(ended, now)
    return after, (*recorded("out", report), *effects)


def cut_short(snapshot: Snapshot) -> tuple[Snapshot, tuple[ev.RecordCarried, ...]]:
    """The engine has ended by itself in the middle of it."""
    report = snapshot.carried
    if snapshot.carry is None or snapshot.state is not EngineState.STOPPING or report is None:
        return replace(snapshot, carry=None), ()
    told = replace(snapshot, carry=None, carried=_worth_telling(report))
    return told, recorded("out", report)


def taken_along(snapshot: Snapshot, problem: Problem, *, served: bool) -> Snapshot:
    """An engine has ended unasked: if it served, what it held is gone, and nobody can say what."""
    if not served:
        return snapshot
    told = problem.model_copy(
        update={"message": f"{problem.message}: all that it held in no file is lost"}
    )
    return replace(snapshot, carried=CarryReport(problem=told))


def hung(snapshot: Snapshot, now: float) -> Step:
    """It does not come to its end: what is not in files by now is not going to be."""
    said = snapshot.carried or CarryReport()
    problem = Problem(
        code=Code.TIMED_OUT,
        message=f"the engine did not give its conversations: no step of it in "
        f"{carry_patience_s(snapshot):g} s",
    )
    return ended_out(snapshot, said.model_copy(update={"problem": problem}), now)


def hurry(snapshot: Snapshot, now: float) -> Step:
    """Somebody waits no longer: first for requests, and then for what is in no file yet."""
    carry, said = snapshot.carry, snapshot.carried or CarryReport()
    if carry is None or snapshot.state is not EngineState.STOPPING:
        return snapshot, ()
    if carry.waits:
        cut = replace(snapshot, carry=replace(carry, waits=False))
        return cut, (ev.CarryCut(snapshot.generation),)
    unknown = "" if said.conversations else "; what it held in no file is lost, and was not told"
    problem = Problem(
        code=Code.SUPERSEDED,
        message=f"stopped at once, without the end of: {carry.progress}{unknown}",
    )
    lossy = replace(snapshot, carry=replace(carry, may_lose=True))
    return ended_out(lossy, said.model_copy(update={"problem": problem}), now)


def brought(snapshot: Snapshot, report: CarryReport) -> CarryReport | None:
    """Return what became of all, from the old engine into the new one; None: there were none."""
    out = snapshot.carried or CarryReport()
    back = {each.file for each in report.conversations}
    return _worth_telling(
        CarryReport(
            conversations=(
                *report.conversations,
                *(each for each in out.conversations if each.file not in back),
            ),
            took_s=out.took_s + report.took_s,
            quiet_s=out.quiet_s + report.quiet_s,
            n_cut=out.n_cut,
            problem=report.problem or out.problem,
        )
    )


def recorded(way: ev.Way, report: CarryReport) -> tuple[ev.RecordCarried, ...]:
    """Return the record of it, where there is anything to record."""
    return () if _worth_telling(report) is None else (ev.RecordCarried(way, report),)


def _refused(snapshot: Snapshot, report: CarryReport, now: float) -> Step:
    """Not all can be kept, and nobody has accepted that: the engine serves on as it is."""
    losses = _losses(report)
    named = [f"{each.what} ({each.n_tokens} tokens): {each.reason}" for each in losses]
    if len(named) > LOSSES_MAX:
        named[LOSSES_MAX:] = [f"and {len(named) - LOSSES_MAX} more"]
    why = "; ".join(named) if report.problem is None else report.problem.message
    problem = Problem(
        code=Code.CARRY_FAILED,
        message=f"the engine runs on, for not all that it holds could be kept: {why}",
        hint="mend that, or accept the loss: --accept-loss",
        details={"losses": [each.model_dump(mode="json") for each in losses]},
    )
    failed = tuple(ev.Fail(name, problem) for name in snapshot.waiting)
    ready = replace(
        snapshot,
        state=EngineState.READY,
        after=After.REST,
        waiting=(),
        carry=None,
        carried=None,
        facts_at=now,
        deadline=now + snapshot.settings.settle_s,
    )
    return ready, (*failed, *goes_on(ready))


def _losses(report: CarryReport) -> tuple[CarriedConversation, ...]:
    return report.of(CarryFate.LOST)


def _worth_telling(report: CarryReport) -> CarryReport | None:
    return report if report.conversations or report.problem is not None else None
