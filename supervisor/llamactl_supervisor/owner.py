"""Who has an engine of `llamactl run`, and what becomes of it when he leaves. Pure.

The owner's life is that of one connection. While there is one, the engine's end is passed on to him
and nothing is loaded again. Without one the engine lingers: the next run takes it as it is, changes
it, or has another take its place; after a while it is stopped. What a run asks for is an apply, and
its operation has the name of the run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamactl_supervisor import applies
from llamactl_supervisor import events as ev
from llamactl_supervisor.apply import at_rest
from llamactl_supervisor.errors import Code
from llamactl_supervisor.models import (
    After,
    Departure,
    EngineState,
    Intent,
    LifecycleOutcome,
    LifecycleResult,
    Problem,
    Receipt,
    RunMessage,
)
from llamactl_supervisor.snapshot import (
    IDLE,
    SERVING,
    Lingering,
    Snapshot,
    Step,
    doing,
    rest,
    wind_down,
)

if TYPE_CHECKING:
    from llamactl_supervisor.models import ExitRecord, Owner

PREDECESSOR = "the daemon before"
_LEFT = Problem(code=Code.SUPERSEDED, message="the run that asked for it has ended")


def who(pid: int) -> str:
    """Return how a run is named where somebody reads who asked for something."""
    return f"run pid {pid}"


def owned(owner: Owner) -> Problem:
    """Return why the engine is not to be had: this run has it."""
    return Problem(
        code=Code.OWNED,
        message=f"the engine belongs to the run with pid {owner.pid} on port {owner.port}, "
        "which goes on",
        hint="end that one; `llamactl run --instance NAME` has an engine beside it",
        details={"pid": owner.pid, "host": owner.host, "port": owner.port},
    )


def run(snapshot: Snapshot, command: ev.Run) -> Step:
    """Make the caller the owner, and the engine what he asks for; or say why not."""
    if snapshot.owner is not None:
        return _reject(snapshot, command, owned(snapshot.owner))
    if command.asked is None:
        return _again(snapshot, command)
    if snapshot.state not in IDLE and not snapshot.is_run and snapshot.intent is Intent.UP:
        message = "the engine of `llamactl up` runs, and is not a run's to have"
        hint = "`llamactl down` ends it; `llamactl run --instance NAME` has one beside it"
        return _reject(snapshot, command, Problem(code=Code.CONFLICT, message=message, hint=hint))
    asked, told = applies.ask(snapshot, command.asked)
    return asked if told else replace(asked, owner=command.owner), told


def _again(snapshot: Snapshot, command: ev.Run) -> Step:
    """The owner of a daemon before this one is back; his engine is left exactly as it is."""
    process = snapshot.process
    there = snapshot.is_run and process is not None and process.instance_id == command.instance_id
    if process is None or not there or snapshot.state is EngineState.STOPPING:
        message = "the engine has ended meanwhile"
        return _reject(snapshot, command, Problem(code=Code.ENGINE_STOPPED, message=message))
    taken = replace(snapshot, owner=command.owner, lingering=None)
    if snapshot.state is EngineState.STARTING:
        return replace(taken, waiting=(*snapshot.waiting, command.operation)), ()
    result = LifecycleResult(outcome=LifecycleOutcome.ALREADY_UP, pid=process.engine.pid)
    return taken, (ev.Finish(command.operation, result),)


def _reject(snapshot: Snapshot, command: ev.Run, problem: Problem) -> Step:
    return snapshot, (ev.Reject(command.operation, problem),)


# --- what follows from every step ----------------------------------------------------------------


def settle(before: Snapshot, after: Snapshot, effects: tuple[ev.Effect, ...], now: float) -> Step:
    """Return what a step means for the owner, and for an engine that had lingered till then.

    What a run asked for was declined: it owns nothing, and the engine lingers on as before.
    """
    owner = after.owner
    if owner is None:
        return after, ()
    if any(isinstance(each, ev.Fail) and each.operation == owner.id for each in effects):
        return replace(after, owner=None), ()
    more: list[ev.Effect] = []
    if after.state is EngineState.STOPPING and before.state is not EngineState.STOPPING:
        after, left = ended(after, Departure.REPLACED, now)
        more += left
        if after.applying is not None and after.applying.command.operation == owner.id:
            why = ", ".join(each.field for each in after.applying.plan.reasons)
            told = RunMessage(event="notice", text=f"the engine is replaced: {why}")
            more.append(ev.Tell(owner.id, told))
    elif any(isinstance(each, ev.Finish) and each.operation == owner.id for each in effects):
        if not any(isinstance(each, ev.RecordAvoided) for each in effects):
            more += _avoided(after, owner)
        after, left = ended(after, Departure.TAKEN, now)
        more += left
    return after, (*more, *_news(before, after, owner))


def _avoided(snapshot: Snapshot, owner: Owner) -> tuple[ev.Effect, ...]:
    """Return the record of a load that was none because the engine was there as it is."""
    geometry = snapshot.facts.geometry
    if geometry is None or snapshot.lingering is None:
        return ()
    receipt = Receipt(outcome="unchanged", previous=geometry, geometry=geometry)
    return (ev.RecordAvoided(receipt, who(owner.pid)),)


def waiting(snapshot: Snapshot, run: str) -> str | None:
    """Return what this run waits for, before it has an engine; None: for nothing that is known."""
    pending = snapshot.pending
    if pending is not None and any(each.operation == run for each in pending.waiting):
        if pending.asked and at_rest(snapshot):
            return "waiting: the engine is asked what this comes to, and may be busy with a prompt"
        return f"waiting: {doing(snapshot)}"
    if run not in snapshot.waiting:
        return None
    if snapshot.state is EngineState.RECONFIGURING:
        return "waiting: the engine changes once it has done with the prompt that it works on"
    return f"waiting: {doing(snapshot)}"


def _news(before: Snapshot, after: Snapshot, owner: Owner) -> list[ev.Tell]:
    """Return what the owner is told of what has changed; nothing of it before he is served."""
    process, told = after.process, list[RunMessage]()
    if process is None or after.pending is not None:
        return []
    name, pid = process.instance_id, process.engine.pid
    same = before.process is not None and before.process.instance_id == name
    was_served = before.owner == owner and same and before.pending is None
    if after.state is EngineState.STARTING and not was_served:
        told.append(RunMessage(event="listen", instance_id=name, pid=pid, linger_s=owner.linger_s))
    if after.state is EngineState.READY and not (was_served and before.state is after.state):
        told.append(RunMessage(event="ready", instance_id=name, pid=pid, linger_s=owner.linger_s))
    override = after.override
    if override is not None and override != before.override and override.by != who(owner.pid):
        has = after.facts.geometry or override
        text = f"now n_ctx {has.n_ctx}, n_seq {has.n_seq}, by {override.by}"
        told.append(RunMessage(event="notice", text=text))
    return [ev.Tell(owner.id, message) for message in told]


# --- the end of an ownership, and of an engine ---------------------------------------------------


def left(snapshot: Snapshot, name: str, now: float) -> Step:
    """The owner is gone: an engine that serves lingers, one that is not there yet is not wanted."""
    owner = snapshot.owner
    if owner is None or owner.id != name:
        return snapshot, ()
    alone = replace(snapshot, owner=None)
    if applies.waits(snapshot, name):
        return applies.drop(alone, name, _LEFT)
    if snapshot.state in IDLE or snapshot.intent is Intent.DOWN:
        return alone, ()
    served = snapshot.state in SERVING
    alone, effects = ended(alone, Departure.TAKEN, now)
    until = now + owner.linger_s if served else now
    alone = replace(alone, lingering=Lingering(who(owner.pid), now, until))
    if served and owner.linger_s > 0:
        return alone, effects
    after, ending = end(alone, Departure.STOPPED if served else Departure.ABORTED, now)
    return after, (*effects, *ending)


def unwanted(snapshot: Snapshot, event: ev.Tick | ev.Pressure, now: float) -> Departure | None:
    """Return why an engine that nobody owns is to end now; None: it is not."""
    lingering = snapshot.lingering
    if lingering is None or snapshot.owner is not None:
        return None
    if isinstance(event, ev.Pressure):
        return Departure.PRESSURE
    return Departure.EXPIRED if now >= lingering.until else None


def end(snapshot: Snapshot, outcome: Departure, now: float) -> Step:
    """Stop an engine that nobody owns."""
    failed = tuple(ev.Fail(name, _LEFT) for name in snapshot.waiting)
    over, effects = ended(snapshot, outcome, now)
    unwanted = replace(over, intent=Intent.DOWN, waiting=())
    if snapshot.state is EngineState.STOPPING:
        return replace(unwanted, after=After.REST), (*failed, *effects)
    # Short of memory nothing is waited for.
    carries = snapshot.settings.carry_on_stop and outcome is not Departure.PRESSURE
    after, stopping = wind_down(unwanted, After.REST, now, carries=carries)
    return after, (*failed, *effects, *stopping)


def ended(snapshot: Snapshot, outcome: Departure, now: float) -> Step:
    """The engine does not linger any more."""
    lingering = snapshot.lingering
    if lingering is None:
        return snapshot, ()
    record = ev.RecordLeft(lingering.by, outcome, max(0.0, now - lingering.since))
    return replace(snapshot, lingering=None), (record,)


def found(snapshot: Snapshot, now: float) -> Snapshot:
    """The daemon is new and the engine runs: its owner may come back."""
    if not snapshot.is_run or snapshot.state is EngineState.STOPPING:
        return snapshot
    until = now + snapshot.settings.reattach_s
    return replace(snapshot, lingering=Lingering(PREDECESSOR, now, until))


def exited(snapshot: Snapshot, record: ExitRecord | None, problem: Problem, now: float) -> Step:
    """The engine of a run has ended by itself: its owner ends like it, and nothing is loaded.

    `record` None: it was never there, for this `problem`.
    """
    failed = tuple(ev.Fail(name, problem) for name in snapshot.waiting)
    told = () if record is None else tell_exit(snapshot, record)
    over, effects = ended(snapshot, Departure.EXITED, now)
    return replace(rest(over), owner=None), (*told, *failed, *effects)


def tell_exit(snapshot: Snapshot, record: ExitRecord | None) -> tuple[ev.Effect, ...]:
    """Return what the owner is told of the engine's end; `record` None: it was asked to end."""
    if snapshot.owner is None:
        return ()
    if record is None:
        message = RunMessage(event="exit", code=0, text="the engine was stopped")
    else:
        lost = record.exit_code is None and record.signal is None
        text = f"the engine {record.summary}" if lost else None
        if snapshot.problem is not None:
            text = snapshot.problem.message
        message = RunMessage(event="exit", code=record.exit_code, signal=record.signal, text=text)
    return (ev.Tell(snapshot.owner.id, message),)
