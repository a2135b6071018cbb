"""What is known about the engine, and the moves from one such knowledge to the next."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor.backoff import delay_s
from llamactl_supervisor.errors import Code
from llamactl_supervisor.launch import instance_id
from llamactl_supervisor.models import (
    After,
    EngineConfig,
    EngineState,
    ExitRecord,
    FieldChange,
    Intent,
    LifecycleOutcome,
    LifecycleResult,
    Override,
    Owner,
    Problem,
    UpRequest,
)

if TYPE_CHECKING:
    from uuid import UUID

    from llamactl_supervisor.config import Config
    from llamactl_supervisor.events import EngineFacts, EngineProcess
    from llamactl_supervisor.models import ApplyPlan, CarryReport
    from llamactl_supervisor.settings import Settings
    from llamactl_supervisor.spec import EngineSpec

IDLE = frozenset({EngineState.STOPPED, EngineState.CRASHED, EngineState.FAILED})
"""States without a process."""
SERVING = frozenset({EngineState.READY, EngineState.RECONFIGURING})
"""States in which the engine answers requests."""
ANSWERING = SERVING | {EngineState.STOPPING}
"""States in which an answer to what it was asked before may still come."""


PAGING_MAX = 4
"""Most page verbs at once: each that waits holds one of the engine's HTTP threads, slots + 4."""


CARRY_SLACK_S = 10.0
"""How much longer than it may take a carrying is waited for, until it counts as hung."""


@dataclass(frozen=True)
class Reloading:
    """A reload on its way: what is in force once the engine has done its part."""

    operation: str
    config: Config
    settings: Settings
    desired: UpRequest | None
    override: Override | None
    changed: tuple[FieldChange, ...]
    needs_restart: tuple[FieldChange, ...]


@dataclass(frozen=True)
class Carry:
    """Conversations on their way: out of an engine in STOPPING, into one in STARTING.

    `may_lose`: the engine is stopped even if one cannot be kept. `waits`: requests under way are
    given time to end. `load_s` is what the load took that they wait for.
    """

    progress: str
    may_lose: bool = True
    waits: bool = True
    load_s: float | None = None


@dataclass(frozen=True)
class Lingering:
    """An engine of `llamactl run` without an owner. Times are on the monotonic clock."""

    by: str
    """Who has left it."""
    since: float
    until: float


@dataclass(frozen=True)
class Pending:
    """The applies that wait. What the first of `commands` comes to is found out next, or `asked`.

    `best` is the newest of those before them that can be, with what it comes to: it is carried out
    unless one of them can be as well. It is on top of the `older` ones, which can be too.
    """

    commands: tuple[ev.Apply, ...] = ()
    best: tuple[ev.Apply, ApplyPlan] | None = None
    older: tuple[ev.Apply, ...] = ()
    asked: bool = False

    @property
    def waiting(self) -> tuple[ev.Apply, ...]:
        """All of them, the oldest first."""
        best = () if self.best is None else (self.best[0],)
        return (*self.older, *best, *self.commands)


@dataclass(frozen=True)
class Applying:
    """An apply that is carried out; `before` is what a relaunch goes back to if it fails.

    The `older` ones are carried out with it, and end as it does: it is on top of them.
    """

    command: ev.Apply
    plan: ApplyPlan
    before: Snapshot | None = None
    older: tuple[ev.Apply, ...] = ()


@dataclass(frozen=True)
class Unended:
    """An apply whose end nobody has been told; `is_sent`: the engine is being asked for it."""

    command: ev.Apply
    is_sent: bool = False


@dataclass(frozen=True)
class Snapshot:
    """Everything the daemon knows about its engine. `deadline` is on the daemon's clock.

    `desired` is what the next start runs, `running` what the present process was asked to be, and
    `running_spec` what its binary took that for. `pending` are the applies that wait, and
    `applying` the one that is carried out: as long as its operation is in `waiting` or `changing`.
    `lost` are those that the daemon before this one died over, until it is known what came of them.
    `config` is the last good one, `baseline` its [engine] as it was brought into force, and
    `reloading` what takes their place, in RECONFIGURING only; `reloads` are those that wait for
    its end. `waiting` holds the operations that end with the present transition, `paging` those
    that the engine ends by its answer, `changing` the reconfigure or reload that was under way
    when it was told to stop, and that its answer may still end. `closing` ends the daemon with its
    engine, `leaving` without it. `deadline` is the end of patience in STARTING, the KILL in
    STOPPING, the retry in CRASHED, in READY the moment from which earlier crashes are forgiven, and
    in FAILED the next look for the files that were missing.

    `crashes` are ends that nobody asked for and loads that failed, in a row; `relapses` are those
    among them that ended an engine which served, and alone still count once the next one does.
    `deferred` loads in a row were not even begun, for no fault of the engine's.

    `owner` is the run that has the engine; `lingering` says how long it stays where it has left,
    and is kept beside a new owner until the engine is what that one asked for.

    `override` is on trial until `trial_ends`: a crash before that, or in a load at any time, goes
    back to `last_good`, and the override is `dropped`, first by generation `dropped_for`. What the
    engine said before `facts_at` is old. `change_by` asked for a change that the daemon before this
    one did not see the end of. `loads_recorded` are the weight loads of this process that the
    ledger has. `unproven` engines live, may be ours, and are left alone. `late` is what was
    configured since and waits for the next daemon.

    `carry` is on the way before the TERM of STOPPING, and after the load of STARTING; `carried` is
    what came of it, until an operation has told that; `slept`: of an engine that was asleep.
    `closed_at` is when an engine got its TERM in whose place another one has yet to listen, and
    `port_closed_s` how long that took, until told. `built` is the llama-server that is run where
    nothing names one.
    """

    seed: UUID
    settings: Settings
    state: EngineState = EngineState.STOPPED
    intent: Intent = Intent.DOWN
    generation: int = 0
    desired: UpRequest | None = None
    running: UpRequest | None = None
    running_spec: EngineSpec | None = None
    pending: Pending | None = None
    applying: Applying | None = None
    lost: tuple[Unended, ...] = ()
    override: Override | None = None
    config: Config | None = None
    baseline: EngineConfig | None = None
    reloading: Reloading | None = None
    process: EngineProcess | None = None
    unproven: tuple[EngineProcess, ...] = ()
    facts: EngineFacts = field(default_factory=ev.EngineFacts)
    after: After = After.REST
    closing: bool = False
    leaving: bool = False
    waiting: tuple[str, ...] = ()
    paging: tuple[str, ...] = ()
    changing: tuple[str, ...] = ()
    reloads: tuple[str, ...] = ()
    crashes: int = 0
    relapses: int = 0
    deferred: int = 0
    deadline: float | None = None
    cause: ev.LoadCause = ev.LoadCause.UP
    load_began: float = 0.0
    problem: Problem | None = None
    last_exit: ExitRecord | None = None
    facts_at: float = 0.0
    loads_recorded: int = 0
    last_good: Override | None = None
    trial_ends: float | None = None
    dropped: Override | None = None
    carry: Carry | None = None
    carried: CarryReport | None = None
    slept: bool = False
    closed_at: float | None = None
    port_closed_s: float | None = None
    change_by: str | None = None
    dropped_for: int = 0
    late: tuple[FieldChange, ...] = ()
    built: str | None = None
    owner: Owner | None = None
    lingering: Lingering | None = None

    @property
    def is_run(self) -> bool:
        """Whether the present engine is one of `llamactl run`."""
        return self.running is not None and self.running.context is not None

    @property
    def due(self) -> float | None:
        """When something has to be done though nothing happens."""
        linger = self.lingering if self.owner is None else None
        times = (self.deadline, None if linger is None else linger.until)
        return min((at for at in times if at is not None), default=None)


Step = tuple[Snapshot, tuple[ev.Effect, ...]]


def spawn(snapshot: Snapshot, cause: ev.LoadCause, now: float) -> Step:
    """Start a process of the next generation. Only ever called where there is none."""
    assert snapshot.state in IDLE or snapshot.process is None
    assert snapshot.desired is not None
    generation = snapshot.generation + 1
    after = replace(
        snapshot,
        state=EngineState.STARTING,
        intent=Intent.UP,
        generation=generation,
        running=snapshot.desired,
        running_spec=None,
        process=None,
        facts=ev.EngineFacts(),
        loads_recorded=0,
        change_by=None,
        deadline=now + snapshot.settings.ready_stall_s,
        cause=cause,
        load_began=now,
        problem=snapshot.problem if snapshot.crashes or snapshot.deferred else None,
        carry=None,
    )
    name = instance_id(snapshot.seed, generation)
    return after, (ev.Spawn(generation, name, snapshot.desired, snapshot.override),)


def cause_after(snapshot: Snapshot, cause: ev.LoadCause, *, begun: bool) -> ev.LoadCause:
    """Return why a new daemon loads the engine: `cause`, unless it is a load of the one before it.

    One that this had `begun`, or was about to try again.
    """
    known = snapshot.cause is not ev.LoadCause.ADOPT
    return snapshot.cause if known and (begun or snapshot.crashes) else cause


def adopt(snapshot: Snapshot, event: ev.Found, now: float) -> Step:
    """Take over the predecessor's engine, or end it where the predecessor was ending it.

    What is to follow (`stopping`) is saved before the TERM, so the TERM was as good as certainly
    sent. Another one would make llama-server exit in its signal handler; what is left to do is to
    wait, then KILL. One that was to be stopped and had not come to that is stopped from the
    beginning. A load that is under way goes on as what it was begun for.
    """
    process = event.process
    found = replace(
        snapshot,
        state=EngineState.STARTING,
        running=snapshot.running or snapshot.desired,
        process=process,
    )
    replaced = event.stopping is After.START  # `cause` is why the next one is loaded
    if not replaced and (snapshot.loads_recorded or not snapshot.load_began):
        found = replace(found, cause=ev.LoadCause.ADOPT, load_began=now)
    found = replace(found, deadline=now + patience_s(found))
    watch = ev.Watch(snapshot.generation, process)
    if event.stopping is None:
        if snapshot.intent is Intent.UP:
            return found, (watch,)
        carries = snapshot.settings.carry_on_stop
        after, effects = wind_down(found, After.REST, now, carries=carries)
        return after, (watch, *effects)
    kill_at = now + snapshot.settings.stop_term_s
    follows = After.REST if snapshot.intent is Intent.DOWN else event.stopping
    return replace(found, state=EngineState.STOPPING, after=follows, deadline=kill_at), (watch,)


def patience_s(snapshot: Snapshot) -> float:
    """Return how long an engine that starts may do nothing; one that has served answers at once."""
    settings = snapshot.settings
    return settings.wedge_idle_s if served(snapshot) else settings.ready_stall_s


def served(snapshot: Snapshot) -> bool:
    """Say whether the engine that starts has served a daemon before this one."""
    return snapshot.cause is ev.LoadCause.ADOPT and snapshot.loads_recorded > 0


def holder_lost(process: EngineProcess) -> Problem | None:
    """Return what it costs an engine that its holder was killed; None while it has one."""
    if process.holder is not None:
        return None
    return Problem(
        code=Code.HOLDER_LOST,
        message="the engine's holder was killed: it serves on without a log, and how it ends will "
        "not be known",
        hint="`llamactl restart` when convenient; it loads the weights again",
    )


def doing(snapshot: Snapshot) -> str:
    """Return in words how far the engine is, to whoever waits for it."""
    if snapshot.carry is not None:
        return snapshot.carry.progress
    if snapshot.state is EngineState.STARTING and served(snapshot):
        return "the running engine is taken over"
    return f"the engine is {snapshot.state}"


def is_restart(snapshot: Snapshot) -> bool:
    """Say whether the engine is being stopped so that another one is started."""
    return snapshot.state is EngineState.STOPPING and snapshot.after is After.START


def unasked(snapshot: Snapshot) -> Snapshot:
    """Let what waits end no more with the transition; a change may yet end by its answer.

    What of it is neither waiting nor changing any more has ended, and whoever asked is to be told.
    """
    under_way = snapshot.waiting if snapshot.state is EngineState.RECONFIGURING else ()
    return replace(snapshot, waiting=(), changing=(*snapshot.changing, *under_way))


def stop(snapshot: Snapshot, after: After, now: float) -> Step:
    """Begin to stop. A process that is still being spawned gets its TERM once it is known."""
    stopping = replace(snapshot, state=EngineState.STOPPING, after=after, deadline=None, carry=None)
    return terminate(stopping, now) if snapshot.process is not None else (stopping, ())


def wind_down(
    snapshot: Snapshot,
    after: After,
    now: float,
    *,
    may_lose: bool = True,
    carries: bool = True,
    waits: bool = True,
) -> Step:
    """Begin to stop in good order: what the engine holds is written to files before its TERM.

    One that does not serve yet holds nothing that is in no file. `carries` False: it is not asked.
    `waits` False: requests under way are cut, and what they hold is written as well.
    """
    serves = snapshot.state in SERVING or served(snapshot)
    if not carries or not serves or snapshot.process is None:
        return stop(snapshot, after, now)
    slept = bool(snapshot.facts.work.is_sleeping)
    stopping = replace(snapshot, state=EngineState.STOPPING, after=after, carried=None, slept=slept)
    return write_out(stopping, now, may_lose=may_lose, waits=waits)


def write_out(snapshot: Snapshot, now: float, *, may_lose: bool, waits: bool) -> Step:
    """Have what the engine holds written to files."""
    assert snapshot.process is not None
    assert snapshot.running is not None
    carry = Carry("writing its conversations", may_lose=may_lose, waits=waits)
    going = replace(snapshot, carry=carry, deadline=now + carry_patience_s(snapshot))
    to = None if may_lose else snapshot.desired
    asked = ev.CarryOut(snapshot.generation, snapshot.process, snapshot.running, may_lose, to)
    return going, (asked,) if waits else (asked, ev.CarryCut(snapshot.generation))


def carry_patience_s(snapshot: Snapshot) -> float:
    """Return how long a carrying may not move: all the time that a writing has, and some more."""
    settings = snapshot.settings
    return settings.drain_s + settings.carry_s + CARRY_SLACK_S


def terminate(snapshot: Snapshot, now: float) -> Step:
    """Send the one TERM; the KILL is due after `stop_term_s`."""
    assert snapshot.process is not None
    closed_at = now if is_restart(snapshot) and not snapshot.is_run else None
    ending = replace(
        for_the_next(snapshot),
        deadline=now + snapshot.settings.stop_term_s,
        closed_at=closed_at,
        port_closed_s=None,
    )
    return ending, (ev.Signal(snapshot.process, ev.Ladder.TERM),)


def for_the_next(snapshot: Snapshot) -> Snapshot:
    """An engine ends for certain: `cause` is why the next one is loaded, if one is to follow."""
    if not is_restart(snapshot):
        return snapshot
    if snapshot.applying is None:
        return replace(snapshot, cause=ev.LoadCause.RESTART)
    return replace(snapshot, cause=apply_cause(snapshot))


def apply_cause(snapshot: Snapshot) -> ev.LoadCause:
    """Return why the engine is loaded that an apply asks for."""
    applying, owner = snapshot.applying, snapshot.owner
    own = owner is not None and applying is not None and applying.command.operation == owner.id
    return ev.LoadCause.RUN if own else ev.LoadCause.APPLY


def stopped(snapshot: Snapshot, operation: str, outcome: LifecycleOutcome) -> ev.Finish | ev.Fail:
    """End a stop or a down. It is no success while an engine lives that may be ours."""
    if not snapshot.unproven:
        result = LifecycleResult(outcome=outcome, carried=snapshot.carried, slept=snapshot.slept)
        return ev.Finish(operation, result)
    pids = [each.engine.pid for each in snapshot.unproven]
    named = ", ".join(map(str, pids))
    problem = Problem(
        code=Code.ENGINE_UNPROVEN,
        message=f"nothing else of ours runs, but an engine that is not provably ours does, with "
        f"pid {named}: left alone",
        hint=f"see `llamactl orphans`; end it yourself if it is not needed: kill {pids[0]}",
        details={"pids": pids},
    )
    return ev.Fail(operation, problem)


def died(
    snapshot: Snapshot, problem: Problem, jitter: float, now: float, *, retry: bool | None = None
) -> Step:
    """The engine is gone and was wanted: retry later, or give up.

    A load that a person has just asked for is not retried: a model that cannot be loaded will not
    load the fifth time either, and the person is there to be told. `retry` False: no load is, for
    the next one would end likewise; True: this one is as well, for the next one is another. A file
    that is not there is no fault of the engine's: when nothing is tried any more, it is still
    looked for.
    """
    if problem.code == Code.STATE_UNWRITABLE:
        return _deferred(snapshot, problem, jitter, now)
    commanded = snapshot.cause in {ev.LoadCause.UP, ev.LoadCause.START}
    wedged = snapshot.state is EngineState.STOPPING and snapshot.after is After.REPLACE
    never_ready = snapshot.state not in SERVING and not wedged
    has_served = not never_ready or snapshot.loads_recorded > 0  # under a daemon before us
    crashes = snapshot.crashes + 1
    cause = snapshot.cause
    if snapshot.process is not None:  # else no engine has ended: it is the same load yet
        cause = ev.LoadCause.WEDGE if wedged else ev.LoadCause.CRASH
    gone = replace(
        snapshot,
        process=None,
        deadline=None,
        crashes=crashes,
        relapses=min(snapshot.relapses, snapshot.crashes) + has_served,
        deferred=0,
        problem=problem,
        cause=cause,
        carry=None,
    )
    hopeless = commanded and never_ready if retry is None else not retry
    given_up = hopeless or crashes > snapshot.settings.crashes_max
    if problem.code == Code.FILE_UNREADABLE:
        awaited = "looked for; `llamactl start` tries at once" if given_up else "waited for"
        problem = problem.model_copy(update={"message": f"{problem.message}; {awaited}"})
        gone = replace(gone, problem=problem)
    if given_up:
        failed = replace(gone, state=EngineState.FAILED, waiting=())
        failed = replace(failed, deadline=look_at(failed, now))
        told = tuple(ev.Fail(name, problem) for name in snapshot.waiting)
        return failed, (*told, ev.Exit()) if snapshot.settings.on_failed == "exit" else told
    return replace(gone, state=EngineState.CRASHED, deadline=_retry_at(gone, jitter, now)), ()


def _deferred(snapshot: Snapshot, problem: Problem, jitter: float, now: float) -> Step:
    """A load could not be begun because the state cannot be saved: it is tried until it can.

    It costs no crash and stays the load that it was; whoever waits for it is told at once.
    """
    problem = problem.model_copy(update={"message": f"{problem.message}; tried again until it is"})
    told = tuple(ev.Fail(name, problem) for name in snapshot.waiting)
    later = replace(
        snapshot,
        state=EngineState.CRASHED,
        process=None,
        waiting=(),
        deferred=snapshot.deferred + 1,
        problem=problem,
    )
    return replace(later, deadline=_retry_at(later, jitter, now)), told


def _retry_at(snapshot: Snapshot, jitter: float, now: float) -> float:
    settings, tries = snapshot.settings, snapshot.crashes + snapshot.deferred
    return now + delay_s(
        tries, jitter, base_s=settings.backoff_base_s, cap_s=settings.backoff_cap_s
    )


def lacks_files(snapshot: Snapshot) -> bool:
    """Say whether the engine was given up for want of files that may yet come."""
    problem, state = snapshot.problem, snapshot.state
    lacks = problem is not None and problem.code == Code.FILE_UNREADABLE
    return lacks and state is EngineState.FAILED and snapshot.settings.on_failed == "stay"


def look_at(snapshot: Snapshot, now: float) -> float | None:
    """Return when to look for those files next; None where none are missing."""
    return now + snapshot.settings.backoff_cap_s if lacks_files(snapshot) else None


def rest(snapshot: Snapshot) -> Snapshot:
    """Nothing runs and nothing is wanted."""
    return replace(
        snapshot,
        state=EngineState.STOPPED,
        intent=Intent.DOWN,
        process=None,
        after=After.REST,
        facts=ev.EngineFacts(),
        waiting=(),
        crashes=0,
        deferred=0,
        deadline=None,
        problem=None,
        carry=None,
        carried=None,
        slept=False,
    )
