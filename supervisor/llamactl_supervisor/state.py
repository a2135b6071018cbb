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

from llamactl_supervisor import applies, apply, carrying, facts, owner, reload
from llamactl_supervisor import events as ev
from llamactl_supervisor.commands import obey
from llamactl_supervisor.errors import UNANSWERED, Code
from llamactl_supervisor.launch import live_spec
from llamactl_supervisor.models import (
    After,
    EngineState,
    Intent,
    LifecycleOutcome,
    LifecycleResult,
    Override,
    Problem,
)
from llamactl_supervisor.snapshot import (
    ANSWERING,
    IDLE,
    SERVING,
    Snapshot,
    Step,
    adopt,
    cause_after,
    died,
    for_the_next,
    holder_lost,
    lacks_files,
    look_at,
    patience_s,
    rest,
    served,
    spawn,
    stop,
    stopped,
    terminate,
    unasked,
)

if TYPE_CHECKING:
    from llamactl_supervisor.events import (
        CarryFact,
        ConfigFact,
        Event,
        Found,
        FoundDead,
        LookedForFiles,
        PageEnded,
        Planned,
        Pressure,
        Rebased,
        Resume,
        RunningFact,
        StartingFact,
        Tick,
    )
    from llamactl_supervisor.models import ExitRecord


def reduce(snapshot: Snapshot, event: Event, now: float) -> Step:
    """Return the next snapshot and what the daemon is to do. Total: no pair of them is an error.

    `now` is on the daemon's clock. A fact about another generation than the present one, or
    about a process that has ended, changes nothing.
    """
    after, effects = _reduce(snapshot, event, now)
    if (after.paging or after.changing) and after.state not in ANSWERING:
        after, effects = _superseded(after, effects)
    effects = apply.tell_older(snapshot, after, effects)
    after, planning = applies.go_on(apply.settle(after, effects))
    effects = (*effects, *planning)
    if not isinstance(event, ev.FoundDead):  # which is not the last that is found
        after, lost = apply.tell_lost(after)
        effects = (*effects, *lost)
    after, told = owner.settle(snapshot, after, effects, now)
    effects = (*effects, *told)
    if after.reloading is not None and not (
        after.state is EngineState.RECONFIGURING or after.reloading.operation in after.changing
    ):
        after = replace(after, reloading=None)
    if after.reloads and after.reloading is None:
        effects = (*effects, *(ev.ReadConfig(name) for name in after.reloads))
        after = replace(after, reloads=())
    settled = after.state is not EngineState.RECONFIGURING and not after.changing
    if after.leaving and not after.closing and settled:
        # Not in the middle of a change: whoever asked for it is told how it ended.
        effects = (*effects, ev.Exit())
    return after, effects


def _reduce(snapshot: Snapshot, event: Event, now: float) -> Step:
    if isinstance(event, ev.Command):
        return obey(snapshot, event, now)
    if isinstance(event, ev.HandOver):
        return replace(snapshot, leaving=True), ()
    if isinstance(event, ev.Left):
        return owner.left(snapshot, event.run, now)
    if isinstance(event, ev.LastWords):
        last = snapshot.last_exit
        if last is None or event.told != last.model_copy(update={"reason": None}):
            return snapshot, ()
        words = event.record.model_copy(update={"reason": last.reason})
        return replace(snapshot, last_exit=words), ()
    if isinstance(event, ev.ProcessFact):
        if event.generation != snapshot.generation or snapshot.state in IDLE:
            return snapshot, ()
        if isinstance(event, ev.CarryFact):
            return _carried(snapshot, event, now)
        if isinstance(event, ev.StartingFact):
            return _while_starting(snapshot, event, now)
        return _while_running(snapshot, event, now)
    return _at_large(snapshot, event, now)


def _superseded(snapshot: Snapshot, effects: tuple[ev.Effect, ...]) -> Step:
    """The engine is gone, and what it was asked got no answer: nothing of it is in force."""
    problem = snapshot.problem or Problem(
        code=Code.SUPERSEDED, message="the engine was stopped before this came to its end"
    )
    failed = tuple(ev.Fail(name, problem) for name in (*snapshot.paging, *snapshot.changing))
    return replace(snapshot, paging=(), changing=()), (*failed, *effects)


def _unanswered(outcome: object) -> bool:
    return isinstance(outcome, Problem) and outcome.code in UNANSWERED


def _page_ended(snapshot: Snapshot, event: PageEnded) -> Step:
    name, outcome = event.operation, event.outcome
    if snapshot.state is EngineState.STOPPING and _unanswered(outcome):
        return snapshot, ()
    left = tuple(other for other in snapshot.paging if other != name)
    end = ev.Fail(name, outcome) if isinstance(outcome, Problem) else ev.Finish(name, outcome)
    return replace(snapshot, paging=left), (end,)


def _at_large(
    snapshot: Snapshot,
    event: ConfigFact
    | Planned
    | Rebased
    | PageEnded
    | Pressure
    | Resume
    | Found
    | FoundDead
    | LookedForFiles
    | Tick,
    now: float,
) -> Step:
    match event:
        case ev.PageEnded() if event.operation in snapshot.paging:
            return _page_ended(snapshot, event)
        case ev.Planned():
            return applies.planned(snapshot, event, now)
        case ev.Rebased():
            return applies.rebased(snapshot, event)
        case ev.ConfigRead():
            return reload.read(snapshot, event)
        case ev.ConfigBroken():
            return snapshot, (ev.Fail(event.operation, event.problem),)
        case ev.Resume() | ev.Found() | ev.FoundDead():
            return _begin(snapshot, event, now)
        case ev.LookedForFiles():
            return _looked(snapshot, event, now)
        case ev.Tick() | ev.Pressure() if why := owner.unwanted(snapshot, event, now):
            return owner.end(snapshot, why, now)
        case ev.Tick() if snapshot.deadline is not None and now >= snapshot.deadline:
            return _due(snapshot, now)
    return snapshot, ()


def _begin(snapshot: Snapshot, event: Resume | Found | FoundDead, now: float) -> Step:
    """The daemon is new."""
    match event:
        case ev.Resume() if snapshot.state is EngineState.FAILED:
            return _resume_failed(snapshot, event, now)
        case ev.Resume() if snapshot.state is EngineState.STOPPED:
            return _resume(snapshot, event, now)
        case ev.Found() if snapshot.state is EngineState.STOPPED:
            adopted, effects = adopt(snapshot, event, now)
            if event.config is not None:
                adopted = reload.compare_found(adopted, event.config, is_followed=event.is_followed)
            return owner.found(adopted, now), effects
        case ev.FoundDead() if snapshot.state is EngineState.STOPPED:
            return _found_dead(snapshot, event, now)
    return snapshot, ()


def _resume(snapshot: Snapshot, event: Resume, now: float) -> Step:
    if event.config is not None:
        snapshot, effects = reload.begin(snapshot, event, event.config, now)
        if effects:
            return snapshot, effects
    if snapshot.desired is not None and snapshot.desired.context is not None:
        return rest(snapshot), ()  # its owner starts it again, or nobody does
    if event.load and snapshot.intent is Intent.UP and snapshot.desired is not None:
        cause = cause_after(snapshot, ev.LoadCause.RESUME, begun=event.begun)
        return spawn(snapshot, cause, now)
    return snapshot, ()


def _resume_failed(snapshot: Snapshot, event: Resume, now: float) -> Step:
    """An engine that was given up is loaded on command, or where it is configured otherwise now.

    Or where it lacked files: after a boot, say, they may be there.
    """
    config = event.config
    otherwise = config is not None and config.engine != snapshot.baseline
    if otherwise or (event.load and lacks_files(snapshot)):
        anew = replace(snapshot, state=EngineState.STOPPED, crashes=0, deadline=None)
        return _resume(anew, event, now)
    return _resume(snapshot, replace(event, load=False), now)


def _found_dead(snapshot: Snapshot, event: FoundDead, now: float) -> Step:
    """It ended while no daemon lived: a crash like any other. Whether it is loaded again is next.

    When it ended is known from its holder; where that left no word, what was on trial is in doubt.
    """
    record, override, served = event.record, snapshot.override, snapshot.loads_recorded > 0
    running = snapshot.running or snapshot.desired
    if running is None:
        return snapshot, ()
    problem = Problem(
        code=Code.ENGINE_EXITED,
        message=f"the engine {record.summary} while no daemon ran",
        hint="its last lines are in the details and in `llamactl logs`",
        details={"last_lines": list(record.last_lines)},
    )
    state = EngineState.READY if served else EngineState.STARTING
    lost = replace(snapshot, state=state, process=event.process, last_exit=record)
    lost = replace(lost, running=running)
    effects: list[ev.Effect] = [facts.crash(lost, record, problem)]
    if not served:
        effects.append(facts.load(lost, lost.cause, None, loaded=False))
    if lost.is_run:
        return rest(lost), tuple(effects)
    known = (record.exit_code, record.signal, record.exec_errno) != (None, None, None)
    if known and override is not None:
        lived_s = (record.at - override.at).total_seconds()
        if lived_s >= snapshot.settings.override_trial_s:
            lost = replace(lost, trial_ends=None)
    lost, problem = facts.fall_back(lost, problem, now, loading=not served)
    retry = True if not served and lost.override != override else None
    after, told = died(lost, problem, 0.0, now, retry=retry)
    if after.state is EngineState.CRASHED:
        after = replace(after, state=EngineState.STOPPED, deadline=None)
    return after, (*effects, *told)


def _looked(snapshot: Snapshot, event: LookedForFiles, now: float) -> Step:
    """One try when the files are back, however many were in vain; else the next look."""
    if not lacks_files(snapshot) or event.generation != snapshot.generation:
        return snapshot, ()
    if event.there:
        return spawn(snapshot, snapshot.cause, now)
    return replace(snapshot, deadline=look_at(snapshot, now)), ()


def _due(snapshot: Snapshot, now: float) -> Step:
    """The deadline of the present state has passed."""
    match snapshot.state:
        case EngineState.STARTING if snapshot.carry is not None:
            problem = Problem(
                code=Code.START_STALLED,
                message="the engine has loaded its weights and then come no further: "
                f"{snapshot.carry.progress}",
                hint="see `llamactl logs`; the conversations are still in their files",
            )
            return stop(replace(snapshot, problem=problem), After.RETRY, now)
        case EngineState.STARTING:
            stall_s = patience_s(snapshot)
            problem = Problem(
                code=Code.START_STALLED,
                message="the engine neither became healthy nor wrote or did anything "
                f"for {stall_s:g} s",
                hint="see `llamactl logs`; LLAMACTL_READY_STALL_S sets the limit",
            )
            return stop(replace(snapshot, problem=problem), After.RETRY, now)
        case EngineState.STOPPING if snapshot.carry is not None:
            return carrying.hung(snapshot, now)
        case EngineState.STOPPING if snapshot.process is not None:
            return replace(snapshot, deadline=None), (ev.Signal(snapshot.process, ev.Ladder.KILL),)
        case EngineState.CRASHED:
            return spawn(snapshot, snapshot.cause, now)
        case EngineState.READY | EngineState.RECONFIGURING:
            return replace(snapshot, deadline=None, crashes=0), ()
        case EngineState.FAILED if snapshot.desired is not None:
            look = ev.LookForFiles(snapshot.generation, snapshot.desired)
            return replace(snapshot, deadline=None), (look,)
        case _:
            return replace(snapshot, deadline=None), ()


def _carried(snapshot: Snapshot, event: CarryFact, now: float) -> Step:
    match event:
        case ev.CarryMoved():
            return carrying.moved(snapshot, event, now)
        case ev.CarriedOut():
            return carrying.ended_out(snapshot, event.report, now)
        case ev.CarriedIn():
            carry, process = snapshot.carry, snapshot.process
            if snapshot.state is not EngineState.STARTING or carry is None or process is None:
                return snapshot, ()
            healthy = ev.Healthy(event.generation, event.facts, event.at)
            known = replace(snapshot, carried=carrying.brought(snapshot, event.report))
            ready, effects = _ready(known, healthy, process, now)
            return ready, (*effects, *carrying.recorded("in", event.report))


def _while_starting(snapshot: Snapshot, event: StartingFact, now: float) -> Step:
    starting = snapshot.state is EngineState.STARTING
    match event:
        case ev.Spawned() if snapshot.process is None:
            known = replace(snapshot, process=event.process, running_spec=event.spec)
            watch = ev.Watch(event.generation, event.process)
            if starting:
                return known, (watch,)
            after, effects = terminate(known, now)
            return after, (watch, *effects)
        case ev.SpawnFailed() if snapshot.process is None:
            return _gone(snapshot, event.problem, event.jitter, now, final=event.final)
        case ev.Moved() | ev.Listens() if starting and snapshot.carry is None:
            return _moves(snapshot, event, now), ()
        case ev.Healthy() if starting and snapshot.process is not None and snapshot.carry is None:
            if carrying.goes_in(snapshot, event.facts):
                return carrying.begin_in(snapshot, snapshot.process, now)
            return _ready(snapshot, event, snapshot.process, now)
        case ev.SocketGone() if starting and served(snapshot) and snapshot.process is not None:
            # It cannot be asked whether it is healthy; it was.
            was = ev.Healthy(event.generation, snapshot.facts, event.at)
            ready, effects = _ready(snapshot, was, snapshot.process, now)
            return replace(ready, problem=event.problem), effects
        case ev.SocketGone() if snapshot.state in SERVING:
            return replace(snapshot, problem=event.problem), ()
        case ev.HolderLost() | ev.HolderLooked() if snapshot.process is not None:
            return _holder(snapshot, event, snapshot.process), ()
    return snapshot, ()


def _moves(snapshot: Snapshot, event: ev.Moved | ev.Listens, now: float) -> Snapshot:
    """The load moves on; who listens for the first time ends the time in which nobody did."""
    moves, since = replace(snapshot, deadline=now + patience_s(snapshot)), snapshot.closed_at
    if isinstance(event, ev.Moved) or since is None:
        return moves
    return replace(moves, closed_at=None, port_closed_s=now - since)


def _holder(
    snapshot: Snapshot, event: ev.HolderLost | ev.HolderLooked, process: ev.EngineProcess
) -> Snapshot:
    """The holder is gone, stopped or at work again: what is wrong with that counts while it runs.

    An engine that loads is told as one without a holder once it serves.
    """
    serves, known = snapshot.state in SERVING, snapshot.problem
    if isinstance(event, ev.HolderLost):
        process = process.model_copy(update={"holder": None})
        return replace(snapshot, process=process, problem=holder_lost(process) if serves else known)
    over = known is not None and known.code == Code.HOLDER_STOPPED
    concerns = serves or snapshot.state is EngineState.STARTING
    if concerns and (event.problem is not None or over):
        return replace(snapshot, problem=event.problem)
    return snapshot


def _ready(snapshot: Snapshot, event: ev.Healthy, process: ev.EngineProcess, now: float) -> Step:
    adopted, carry = snapshot.cause is ev.LoadCause.ADOPT, snapshot.carry
    load_s = None if adopted else now - snapshot.load_began
    if carry is not None:
        load_s = carry.load_s
    result = LifecycleResult(
        outcome=LifecycleOutcome.STARTED,
        pid=process.engine.pid,
        load_s=load_s,
        port_closed_s=snapshot.port_closed_s,
        carried=snapshot.carried,
        slept=snapshot.slept,
    )
    finished = tuple(
        ev.Finish(name, apply.result(snapshot, name, result)) for name in snapshot.waiting
    )
    snapshot, records = facts.took(snapshot, event.facts, event.at, now, load_s=load_s)
    ready = replace(
        snapshot,
        state=EngineState.READY,
        waiting=(),
        problem=holder_lost(process),
        crashes=min(snapshot.crashes, snapshot.relapses),
        deferred=0,
        facts_at=now,
        deadline=now + snapshot.settings.settle_s,
        carry=None,
        carried=None,
        slept=False,
        port_closed_s=None,
    )
    # Whatever its daemon before had begun with it, a load that it has not recorded included.
    found = adopted or process.adopted
    goes_on = carrying.goes_on(ready) if found and carry is None else ()
    return ready, (*finished, *records, *goes_on)


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
            return facts.observed(_socket(snapshot, event.problem), event, now)
        case ev.Wedged() if snapshot.state in SERVING:
            wedged = replace(unasked(snapshot), problem=event.problem)
            left = [name for name in snapshot.waiting if name not in wedged.changing]
            after, effects = stop(wedged, After.REPLACE, now)
            return after, (*(ev.Fail(name, event.problem) for name in left), *effects)
        case ev.Reconfigured() if snapshot.loads_recorded:
            return _reconfigured(snapshot, event, now)
        case ev.ReconfigureFailed() if snapshot.state is EngineState.RECONFIGURING:
            failed = tuple(ev.Fail(name, event.problem) for name in snapshot.waiting)
            ready = replace(snapshot, state=EngineState.READY, waiting=(), facts_at=now)
            return ready, failed
        case ev.ReconfigureFailed() if not _unanswered(event.problem):
            declined = tuple(ev.Fail(name, event.problem) for name in snapshot.changing)
            return replace(snapshot, changing=()), declined
    return snapshot, ()


def _socket(snapshot: Snapshot, problem: Problem | None) -> Snapshot:
    """The engine answers; what is wrong with its socket, or was, is known."""
    known = snapshot.problem
    if problem is None and (known is None or known.code != Code.ENGINE_SOCKET_GONE):
        return snapshot
    assert snapshot.process is not None
    return replace(snapshot, problem=problem or holder_lost(snapshot.process))


def _before_its_term(snapshot: Snapshot, problem: Problem, record: ExitRecord | None) -> Step:
    """Tell what an engine that was to be stopped took with it by ending first, if it did."""
    early = snapshot.carry is not None and snapshot.state is EngineState.STOPPING
    crash = (facts.crash(snapshot, record, problem),) if early and record is not None else ()
    after, left = carrying.cut_short(snapshot)
    return for_the_next(after) if early else after, (*crash, *left)


def _ended_for(snapshot: Snapshot, problem: Problem) -> tuple[Snapshot, Problem]:
    """Return why it was stopped, which counts more than how it ended and is kept beside that."""
    why, last = snapshot.problem, snapshot.last_exit
    if snapshot.state is not EngineState.STOPPING or why is None:
        return snapshot, problem
    if last is None:
        return snapshot, why
    return replace(snapshot, last_exit=last.model_copy(update={"reason": why.message})), why


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
    snapshot, left = _before_its_term(snapshot, problem, record)
    lost: list[ev.Effect] = [*left]
    if snapshot.state is EngineState.STOPPING and snapshot.after is After.REST:
        effects: list[ev.Effect] = [
            apply.stopped(snapshot, name) or stopped(snapshot, name, LifecycleOutcome.STOPPED)
            for name in snapshot.waiting
        ]
        if not snapshot.loads_recorded and snapshot.cause is not ev.LoadCause.ADOPT:
            load_s = now - snapshot.load_began
            aborted = facts.load(snapshot, snapshot.cause, load_s, loaded=False)
            effects.append(replace(aborted, aborted=True))
        told = owner.tell_exit(snapshot, None)
        over = replace(rest(snapshot), owner=None)
        exits = (ev.Exit(),) if snapshot.closing else ()
        return over, (*lost, *told, *effects, *exits)
    if snapshot.state is EngineState.STOPPING and snapshot.after is After.START:
        after, effects_start = spawn(replace(snapshot, process=None), snapshot.cause, now)
        return after, (*lost, *effects_start)
    replaced = snapshot.state is EngineState.STOPPING and snapshot.after is After.REPLACE
    served = snapshot.state in SERVING or replaced
    loading = not served and snapshot.cause is not ev.LoadCause.ADOPT
    if loading and not snapshot.deferred:  # one line, however often it is put off
        load_s = now - snapshot.load_began
        lost.append(facts.load(snapshot, snapshot.cause, load_s, loaded=False))
    snapshot, problem = _ended_for(snapshot, problem)
    retry = False if final else None
    if record is not None:
        snapshot = replace(carrying.taken_along(snapshot, problem, served=served), slept=False)
        lost.append(facts.crash(snapshot, record, problem))
    if snapshot.is_run:
        over, ending = owner.exited(snapshot, record, problem, now)
        return over, (*lost, *ending)
    if record is not None:
        override = snapshot.override
        snapshot, problem = facts.fall_back(snapshot, problem, now, loading=loading)
        retry = True if loading and snapshot.override != override else None
    changing = snapshot.waiting if snapshot.state is EngineState.RECONFIGURING else ()
    snapshot = replace(snapshot, waiting=()) if changing else snapshot
    back = apply.roll_back(snapshot, problem, now) if loading else None
    after, effects_after = back or died(snapshot, problem, jitter, now, retry=retry)
    if after.state is EngineState.CRASHED:
        problem = problem.model_copy(
            update={"message": f"{problem.message}; it is being loaded again"}
        )
    return after, (*lost, *(ev.Fail(name, problem) for name in changing), *effects_after)


def _reconfigured(snapshot: Snapshot, event: ev.Reconfigured, now: float) -> Step:
    receipt, change = event.receipt, event.change
    applying = apply.changes(snapshot)
    if applying or snapshot.reloading is not None:
        snapshot, effects = facts.answered(snapshot, receipt, event.by, now)
        if applying:
            after, finished = apply.reconfigured(_answered(snapshot, now), receipt, event.at, now)
        else:
            after, finished = reload.commit(_answered(snapshot, now), receipt)
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
        else:
            snapshot = replace(snapshot, override=override)
    snapshot, effects = facts.answered(snapshot, receipt, event.by, now)
    changing = snapshot.state is EngineState.RECONFIGURING
    ends = snapshot.waiting if changing else snapshot.changing
    finished = tuple(ev.Finish(name, receipt) for name in ends)
    return _answered(snapshot, now), (*effects, *finished)


def _answered(snapshot: Snapshot, now: float) -> Snapshot:
    """The engine has answered what it was asked to change; one that stops goes on stopping."""
    answered = replace(snapshot, changing=(), facts_at=now)
    if snapshot.state is not EngineState.RECONFIGURING:
        return answered
    return replace(answered, state=EngineState.READY, waiting=())
