"""What is known about the engine, and the moves from one such knowledge to the next."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor.backoff import delay_s
from llamactl_supervisor.launch import instance_id
from llamactl_supervisor.models import (
    EngineConfig,
    EngineState,
    ExitRecord,
    FieldChange,
    Intent,
    Override,
    Problem,
    UpRequest,
)

if TYPE_CHECKING:
    from uuid import UUID

    from llamactl_supervisor.config import Config
    from llamactl_supervisor.events import EngineFacts, EngineProcess
    from llamactl_supervisor.settings import Settings

IDLE = frozenset({EngineState.STOPPED, EngineState.CRASHED, EngineState.FAILED})
"""States without a process."""
SERVING = frozenset({EngineState.READY, EngineState.RECONFIGURING})
"""States in which the engine answers requests."""


RETRIES = frozenset({ev.LoadCause.CRASH, ev.LoadCause.WEDGE})
"""Loads that nobody asked for: the engine before did not end well."""

PAGING_MAX = 4
"""Most page verbs at once: each that waits holds one of the engine's HTTP threads, slots + 4."""


class After(Enum):
    """What follows STOPPING."""

    REST = "rest"
    START = "start"
    RETRY = "retry"
    """The load stalled."""
    REPLACE = "replace"
    """It served, and was wedged."""


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
class Snapshot:
    """Everything the daemon knows about its engine. `deadline` is on the monotonic clock.

    `desired` is what the next start runs, `running` what the present process was asked to be.
    `config` is the last good one, `baseline` its [engine] as it was brought into force, and
    `reloading` what takes their place, in RECONFIGURING only; `reloads` are those that wait for
    its end. `waiting` holds the operations that end with the present transition, `paging` those
    that the engine ends by its answer while it serves. `closing` ends the daemon with its engine,
    `leaving` without it. `deadline` is the end of patience in STARTING, the KILL in STOPPING, the
    retry in CRASHED, and in READY the moment from which earlier crashes are forgiven.

    `override` is on trial until `trial_ends`: a crash before that, or in a load at any time, goes
    back to `last_good`, and the override is `dropped`. What the engine said before `facts_at` is
    old. `loads_recorded` are the weight loads of this process that the ledger has.
    """

    seed: UUID
    settings: Settings
    state: EngineState = EngineState.STOPPED
    intent: Intent = Intent.DOWN
    generation: int = 0
    desired: UpRequest | None = None
    running: UpRequest | None = None
    override: Override | None = None
    config: Config | None = None
    baseline: EngineConfig | None = None
    reloading: Reloading | None = None
    process: EngineProcess | None = None
    facts: EngineFacts = field(default_factory=ev.EngineFacts)
    after: After = After.REST
    closing: bool = False
    leaving: bool = False
    waiting: tuple[str, ...] = ()
    paging: tuple[str, ...] = ()
    reloads: tuple[str, ...] = ()
    crashes: int = 0
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
        process=None,
        facts=ev.EngineFacts(),
        loads_recorded=0,
        deadline=now + snapshot.settings.ready_stall_s,
        cause=cause,
        load_began=now,
        problem=snapshot.problem if cause in RETRIES else None,
    )
    name = instance_id(snapshot.seed, generation)
    return after, (ev.Spawn(generation, name, snapshot.desired, snapshot.override),)


def adopt(snapshot: Snapshot, process: EngineProcess, now: float) -> Step:
    """Take over the predecessor's engine, or end it where the predecessor was ending it.

    The intent is saved before the TERM, so the TERM was as good as certainly sent. Another one
    would make llama-server exit in its signal handler; what is left to do is to wait, then KILL.
    """
    found = replace(
        snapshot,
        state=EngineState.STARTING,
        running=snapshot.running or snapshot.desired,
        process=process,
        cause=ev.LoadCause.ADOPT,
        load_began=now,
    )
    found = replace(found, deadline=now + patience_s(found))
    watch = ev.Watch(snapshot.generation, process)
    if snapshot.intent is Intent.UP:
        return found, (watch,)
    kill_at = now + snapshot.settings.stop_term_s
    return replace(found, state=EngineState.STOPPING, after=After.REST, deadline=kill_at), (watch,)


def patience_s(snapshot: Snapshot) -> float:
    """Return how long an engine that starts may do nothing; one that has served answers at once."""
    settings = snapshot.settings
    served = snapshot.cause is ev.LoadCause.ADOPT and snapshot.loads_recorded > 0
    return settings.wedge_idle_s if served else settings.ready_stall_s


def stop(snapshot: Snapshot, after: After, now: float) -> Step:
    """Begin to stop. A process that is still being spawned gets its TERM once it is known."""
    stopping = replace(snapshot, state=EngineState.STOPPING, after=after, deadline=None)
    return terminate(stopping, now) if snapshot.process is not None else (stopping, ())


def terminate(snapshot: Snapshot, now: float) -> Step:
    """Send the one TERM; the KILL is due after `stop_term_s`."""
    assert snapshot.process is not None
    deadline = now + snapshot.settings.stop_term_s
    return replace(snapshot, deadline=deadline), (ev.Signal(snapshot.process, ev.Ladder.TERM),)


def died(
    snapshot: Snapshot, problem: Problem, jitter: float, now: float, *, retry: bool | None = None
) -> Step:
    """The engine is gone and was wanted: retry later, or give up.

    A load that a person has just asked for is not retried: a model that cannot be loaded will not
    load the fifth time either, and the person is there to be told. `retry` False: no load is, for
    the next one would end likewise; True: this one is as well, for the next one is another.
    """
    commanded = snapshot.cause in {ev.LoadCause.UP, ev.LoadCause.START}
    wedged = snapshot.state is EngineState.STOPPING and snapshot.after is After.REPLACE
    never_ready = snapshot.state not in SERVING and not wedged
    crashes = snapshot.crashes + 1
    cause = ev.LoadCause.WEDGE if wedged else ev.LoadCause.CRASH
    gone = replace(
        snapshot, process=None, deadline=None, crashes=crashes, problem=problem, cause=cause
    )
    hopeless = commanded and never_ready if retry is None else not retry
    if hopeless or crashes > snapshot.settings.crashes_max:
        failed = replace(gone, state=EngineState.FAILED, waiting=())
        told = tuple(ev.Fail(name, problem) for name in snapshot.waiting)
        return failed, (*told, ev.Exit()) if snapshot.settings.on_failed == "exit" else told
    settings = snapshot.settings
    wait_s = delay_s(crashes, jitter, base_s=settings.backoff_base_s, cap_s=settings.backoff_cap_s)
    return replace(gone, state=EngineState.CRASHED, deadline=now + wait_s), ()


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
        deadline=None,
        problem=None,
    )
