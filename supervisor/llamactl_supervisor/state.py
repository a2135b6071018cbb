"""The engine's state machine: `reduce(snapshot, event, now) -> (snapshot, effects)`, pure, total.

    STOPPED ──up──> STARTING ──healthy──> READY <──> RECONFIGURING
       ^               │ died               │ died         │ died
       │               v                    v              v
       └──stop── CRASHED (retries after a delay) ── too often ──> FAILED (waits for a person)

An engine that is wedged is stopped out of READY or RECONFIGURING, and counts as crashed.

STOPPING is on the way from any state with a process. An engine exists in STARTING, READY,
RECONFIGURING and STOPPING only, and only its end leaves them: so there are never two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor import facts, reload
from llamactl_supervisor.commands import obey
from llamactl_supervisor.errors import Code
from llamactl_supervisor.launch import live_spec
from llamactl_supervisor.models import (
    EngineState,
    Intent,
    LifecycleOutcome,
    LifecycleResult,
    Override,
    Problem,
)
from llamactl_supervisor.snapshot import (
    IDLE,
    SERVING,
    After,
    Snapshot,
    Step,
    adopt,
    died,
    patience_s,
    rest,
    spawn,
    stop,
    terminate,
)

if TYPE_CHECKING:
    from llamactl_supervisor.events import (
        ConfigFact,
        Event,
        Found,
        PageEnded,
        Resume,
        RunningFact,
        StartingFact,
        Tick,
    )
    from llamactl_supervisor.models import ExitRecord


LATE_S = 5.0
"""A deadline that is noticed so late passed while the daemon did not run."""


def reduce(snapshot: Snapshot, event: Event, now: float) -> Step:
    """Return the next snapshot and what the daemon is to do. Total: no pair of them is an error.

    `now` is on the monotonic clock. A fact about another generation than the present one, or
    about a process that has ended, changes nothing.
    """
    after, effects = _reduce(snapshot, event, now)
    if after.reloading is not None and after.state is not EngineState.RECONFIGURING:
        after = replace(after, reloading=None)
    if after.reloads and after.reloading is None:
        effects = (*effects, *(ev.ReadConfig(name) for name in after.reloads))
        after = replace(after, reloads=())
    if after.paging and after.state not in SERVING:
        after, effects = _superseded(after, effects)
    if after.leaving and not after.closing and after.state is not EngineState.RECONFIGURING:
        # Not in the middle of a change: whoever asked for it is told how it ended.
        effects = (*effects, ev.Exit())
    return after, effects


def _reduce(snapshot: Snapshot, event: Event, now: float) -> Step:
    if isinstance(event, ev.Command):
        return obey(snapshot, event, now)
    if isinstance(event, ev.HandOver):
        return replace(snapshot, leaving=True), ()
    if isinstance(event, ev.ProcessFact):
        if event.generation != snapshot.generation or snapshot.state in IDLE:
            return snapshot, ()
        if isinstance(event, ev.StartingFact):
            return _while_starting(snapshot, event, now)
        return _while_running(snapshot, event, now)
    return _at_large(snapshot, event, now)


def _superseded(snapshot: Snapshot, effects: tuple[ev.Effect, ...]) -> Step:
    """The engine serves no more: its page verbs end here, whatever it still answers.

    Nothing hangs on that answer: pages and slots are gone with the process.
    """
    problem = snapshot.problem or Problem(
        code=Code.SUPERSEDED, message="the engine was stopped before this came to its end"
    )
    failed = tuple(ev.Fail(name, problem) for name in snapshot.paging)
    return replace(snapshot, paging=()), (*failed, *effects)


def _at_large(
    snapshot: Snapshot,
    event: ConfigFact | PageEnded | Resume | Found | Tick,
    now: float,
) -> Step:
    match event:
        case ev.PageEnded() if event.operation in snapshot.paging:
            name, outcome = event.operation, event.outcome
            paging = tuple(other for other in snapshot.paging if other != name)
            if isinstance(outcome, Problem):
                return replace(snapshot, paging=paging), (ev.Fail(name, outcome),)
            return replace(snapshot, paging=paging), (ev.Finish(name, outcome),)
        case ev.ConfigRead():
            return reload.read(snapshot, event)
        case ev.ConfigBroken():
            return snapshot, (ev.Fail(event.operation, event.problem),)
        case ev.Resume() if snapshot.state is EngineState.STOPPED:
            return _resume(snapshot, event, now)
        case ev.Found() if snapshot.state is EngineState.STOPPED:
            adopted, effects = adopt(snapshot, event.process, now)
            if event.config is not None:
                adopted = reload.compare_found(adopted, event.config)
            return adopted, effects
        case ev.Tick():
            if snapshot.deadline is not None and now >= snapshot.deadline:
                return _due(snapshot, now)
    return snapshot, ()


def _resume(snapshot: Snapshot, event: Resume, now: float) -> Step:
    if event.config is not None:
        snapshot, effects = reload.begin(snapshot, event.config, load=event.load, now=now)
        if effects:
            return snapshot, effects
    if event.load and snapshot.intent is Intent.UP and snapshot.desired is not None:
        return spawn(snapshot, ev.LoadCause.RESUME, now)
    return snapshot, ()


def _due(snapshot: Snapshot, now: float) -> Step:
    """The deadline of the present state has passed.

    A load is not given up by a daemon that was stopped itself: who did not look has seen nothing.
    """
    late_s = 0.0 if snapshot.deadline is None else now - snapshot.deadline
    match snapshot.state:
        case EngineState.STARTING if late_s > LATE_S:
            return replace(snapshot, deadline=now + patience_s(snapshot)), ()
        case EngineState.STARTING:
            stall_s = patience_s(snapshot)
            problem = Problem(
                code=Code.START_STALLED,
                message=f"the engine neither became healthy nor wrote anything for {stall_s:g} s",
                hint="see `llamactl logs`; LLAMACTL_READY_STALL_S sets the limit",
            )
            return stop(replace(snapshot, problem=problem), After.RETRY, now)
        case EngineState.STOPPING if snapshot.process is not None:
            return replace(snapshot, deadline=None), (ev.Signal(snapshot.process, ev.Ladder.KILL),)
        case EngineState.CRASHED:
            return spawn(snapshot, snapshot.cause, now)
        case EngineState.READY | EngineState.RECONFIGURING:
            return replace(snapshot, deadline=None, crashes=0), ()
        case _:
            return replace(snapshot, deadline=None), ()


def _while_starting(snapshot: Snapshot, event: StartingFact, now: float) -> Step:
    starting = snapshot.state is EngineState.STARTING
    match event:
        case ev.Spawned() if snapshot.process is None:
            known = replace(snapshot, process=event.process)
            watch = ev.Watch(event.generation, event.process)
            if starting:
                return known, (watch,)
            after, effects = terminate(known, now)
            return after, (watch, *effects)
        case ev.SpawnFailed() if snapshot.process is None:
            return _gone(snapshot, event.problem, event.jitter, now, final=event.final)
        case ev.Moved() if starting:
            return replace(snapshot, deadline=now + patience_s(snapshot)), ()
        case ev.Healthy() if starting and snapshot.process is not None:
            return _ready(snapshot, event, snapshot.process, now)
        case ev.HolderLost() if snapshot.process is not None:
            process = snapshot.process.model_copy(update={"holder": None})
            return replace(snapshot, process=process), ()
    return snapshot, ()


def _ready(snapshot: Snapshot, event: ev.Healthy, process: ev.EngineProcess, now: float) -> Step:
    adopted = snapshot.cause is ev.LoadCause.ADOPT
    load_s = None if adopted else now - snapshot.load_began
    result = LifecycleResult(
        outcome=LifecycleOutcome.STARTED, pid=process.engine.pid, load_s=load_s
    )
    finished = tuple(ev.Finish(name, result) for name in snapshot.waiting)
    snapshot, records = facts.took(snapshot, event.facts, event.at, now, load_s=load_s)
    ready = replace(
        snapshot,
        state=EngineState.READY,
        waiting=(),
        problem=None,
        facts_at=now,
        deadline=now + snapshot.settings.settle_s,
    )
    return ready, (*finished, *records)


def _while_running(snapshot: Snapshot, event: RunningFact, now: float) -> Step:
    match event:
        case ev.Exited() if snapshot.process is not None:
            problem = Problem(
                code=Code.ENGINE_EXITED,
                message=f"the engine {event.record.summary} while it was {snapshot.state}",
                hint="its last lines are in the details and in `llamactl logs`",
                details={"last_lines": list(event.record.last_lines)},
            )
            return _gone(snapshot, problem, event.jitter, now, event.record)
        case ev.Observed() if snapshot.state in SERVING:
            return facts.observed(snapshot, event, now)
        case ev.Wedged() if snapshot.state in SERVING:
            failed = tuple(ev.Fail(name, event.problem) for name in snapshot.waiting)
            wedged = replace(snapshot, waiting=(), problem=event.problem)
            after, effects = stop(wedged, After.REPLACE, now)
            return after, (*failed, *effects)
        case ev.Reconfigured() if snapshot.loads_recorded:
            return _reconfigured(snapshot, event, now)
        case ev.ReconfigureFailed() if snapshot.state is EngineState.RECONFIGURING:
            failed = tuple(ev.Fail(name, event.problem) for name in snapshot.waiting)
            ready = replace(snapshot, state=EngineState.READY, waiting=(), facts_at=now)
            return ready, failed
    return snapshot, ()


def _gone(
    snapshot: Snapshot,
    problem: Problem,
    jitter: float,
    now: float,
    record: ExitRecord | None = None,
    *,
    final: bool = False,
) -> Step:
    """There is no process any more; what follows depends on what it was doing and why.

    `record` None: there never was one. `final`: nor will there be one by trying again.
    """
    snapshot = replace(snapshot, last_exit=record or snapshot.last_exit)
    if snapshot.state is EngineState.STOPPING and snapshot.after is After.REST:
        result = LifecycleResult(outcome=LifecycleOutcome.STOPPED)
        effects: list[ev.Effect] = [ev.Finish(name, result) for name in snapshot.waiting]
        return rest(snapshot), (*effects, *((ev.Exit(),) if snapshot.closing else ()))
    if snapshot.state is EngineState.STOPPING and snapshot.after is After.START:
        return spawn(replace(snapshot, process=None), ev.LoadCause.RESTART, now)
    lost: list[ev.Effect] = []
    replaced = snapshot.state is EngineState.STOPPING and snapshot.after is After.REPLACE
    served = snapshot.state in SERVING or replaced
    loading = not served and snapshot.cause is not ev.LoadCause.ADOPT
    if loading:
        load_s = now - snapshot.load_began
        lost.append(facts.load(snapshot, snapshot.cause, load_s, loaded=False))
    if snapshot.state is EngineState.STOPPING:  # it was stopped for a reason that counts more
        problem = snapshot.problem or problem
    retry = False if final else None
    if record is not None:
        lost.append(facts.crash(snapshot, record, problem))
        override = snapshot.override
        snapshot, problem = facts.fall_back(snapshot, problem, now, loading=loading)
        retry = True if loading and snapshot.override != override else None
    if snapshot.state is EngineState.RECONFIGURING:
        lost += [ev.Fail(name, problem) for name in snapshot.waiting]
        snapshot = replace(snapshot, waiting=())
    after, effects_after = died(snapshot, problem, jitter, now, retry=retry)
    return after, (*lost, *effects_after)


def _reconfigured(snapshot: Snapshot, event: ev.Reconfigured, now: float) -> Step:
    receipt, change = event.receipt, event.change
    effects: tuple[ev.Effect, ...] = ()
    if snapshot.reloading is not None:
        if receipt.outcome == "applied":
            snapshot, effects = facts.applied(snapshot, receipt, event.by, now)
        ready = replace(snapshot, state=EngineState.READY, waiting=(), facts_at=now)
        after, finished = reload.commit(ready, receipt)
        return after, (*effects, *finished)
    if receipt.outcome != "planned" and snapshot.desired is not None:
        asked = live_spec(snapshot.desired.spec, snapshot.override)
        unified = asked.kv_unified if change.kv_unified is None else change.kv_unified
        override = Override(
            n_ctx=change.n_ctx or asked.n_ctx,
            n_seq=change.n_seq or asked.n_seq,
            kv_unified=unified,
            by=event.by,
            at=event.at,
        )
        if receipt.outcome == "applied":
            snapshot = facts.on_trial(snapshot, override, now)
            snapshot, effects = facts.applied(snapshot, receipt, event.by, now)
        else:
            snapshot = replace(snapshot, override=override)
    if snapshot.state is EngineState.RECONFIGURING:
        effects = (*effects, *(ev.Finish(name, receipt) for name in snapshot.waiting))
        snapshot = replace(snapshot, state=EngineState.READY, waiting=(), facts_at=now)
    return snapshot, effects
