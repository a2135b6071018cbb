"""What can happen to the engine and what the daemon can do about it; `state.reduce` joins the two.

Every fact about a process carries the generation of that process, so that one which arrives late
is recognised as old.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - dataclass fields
from enum import Enum
from typing import TYPE_CHECKING, Literal

from llamactl_supervisor.models import EngineProcess as EngineProcess  # noqa: TC001 - `ev.` has it
from llamactl_supervisor.models import LoadCause as LoadCause  # noqa: TC001 - `ev.` has it
from llamactl_supervisor.progress import Answer

if TYPE_CHECKING:
    from llamactl_supervisor.config import Config
    from llamactl_supervisor.models import (
        After,
        ApplyPlan,
        ApplyRequest,
        CarryReport,
        Departure,
        EngineRequest,
        ExitRecord,
        FileReceipt,
        Geometry,
        LostApply,
        OperationKind,
        OperationResult,
        Override,
        Owner,
        PageReceipt,
        Problem,
        Receipt,
        ReconfigureRequest,
        RunMessage,
        UpRequest,
    )
    from llamactl_supervisor.settings import Settings
    from llamactl_supervisor.spec import EngineSpec


@dataclass(frozen=True)
class EngineFacts:
    """What the engine said about itself when last asked; `is_quiet` None: it knows no quiet."""

    geometry: Geometry | None = None
    n_weight_loads: int | None = None
    last_reconfigure: Receipt | None = None
    work: Answer = field(default_factory=Answer)
    is_quiet: bool | None = None


Way = Literal["out", "in"]
"""Where conversations were carried: out of an engine, or into one."""


class Ladder(Enum):
    """The two steps of stopping an engine. There is never a second TERM."""

    TERM = "term"
    KILL = "kill"


# --- commands: each asked for by one operation ---------------------------------------------------


@dataclass(frozen=True)
class Up:
    """Run this engine. `exact`: with this very geometry, whatever was set live meanwhile."""

    operation: str
    request: UpRequest
    exact: bool = False


@dataclass(frozen=True)
class Start:
    """Run the engine that was last asked for."""

    operation: str


@dataclass(frozen=True)
class Run:
    """Be the engine's owner and have it as is `asked`; None: be the one of that instance again."""

    operation: str
    owner: Owner
    asked: Apply | None
    instance_id: str | None = None


@dataclass(frozen=True)
class Stop:
    """Stop the engine; one that has an owner only if `now`.

    `now` also ends the wait for conversations of an engine that is being stopped.
    """

    operation: str
    now: bool = False


@dataclass(frozen=True)
class Restart:
    """Stop the engine and load it again; `accept_loss`: even if a conversation cannot be kept."""

    operation: str
    accept_loss: bool = False


@dataclass(frozen=True)
class Down:
    """Stop the engine, then the daemon. `now`: as with `Stop`."""

    operation: str
    now: bool = False


@dataclass(frozen=True)
class Reconfigure:
    """Change the live geometry."""

    operation: str
    change: ReconfigureRequest


@dataclass(frozen=True)
class Apply:
    """Bring the engine to `request`, which its binary takes for `spec`.

    `asked` is what of it was asked for, on top of what was wanted by then; None: all of it.
    `config`: it is the [engine] of this configuration, which is in force then.
    """

    operation: str
    request: UpRequest
    spec: EngineSpec
    by: str
    asked: ApplyRequest | None = None
    live_only: bool = False
    overcommit: bool = False
    accept_loss: bool = False
    config: Config | None = None


@dataclass(frozen=True)
class Reload:
    """Read the configuration again and follow it."""

    operation: str


@dataclass(frozen=True)
class Page:
    """Take a conversation out of a slot or into one, or drop it: PAGE_OUT, PAGE_IN, PAGE_DROP.

    One that goes out with a `home` is parked: a change that has room places it back.
    """

    operation: str
    kind: OperationKind
    name: str
    slot: int = 0
    home: int | None = None

    @property
    def subject(self) -> str:
        """What it is done to, as a person reads it."""
        return f"page {self.name!r}"


@dataclass(frozen=True)
class PageFile:
    """Write a page or a slot to files, or read them into a slot: PAGE_SPILL, _SAVE, _RESTORE.

    Only a spill has a `page`, and frees it if `drop`.
    """

    operation: str
    kind: OperationKind
    filename: str
    slot: int = 0
    page: str | None = None
    drop: bool = False

    @property
    def subject(self) -> str:
        """What it is done to, as a person reads it."""
        return f"file {self.filename!r}"


# --- facts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resume:
    """The daemon is new and nothing runs.

    If `load`, the engine is started that the configuration names, else what the saved intent says.
    `begun`: its predecessor had begun a load, or ended an engine for one, and no engine came of it.
    """

    config: Config | None = None
    load: bool = True
    begun: bool = False


@dataclass(frozen=True)
class Found:
    """The daemon is new and the engine of its predecessor runs and is proven ours.

    `stopping`: its predecessor was stopping it, and this was to follow. `is_followed`: what the
    configuration changes will be applied.
    """

    process: EngineProcess
    config: Config | None = None
    stopping: After | None = None
    is_followed: bool = False


@dataclass(frozen=True)
class FoundDead:
    """The daemon is new; the engine of its predecessor ended while no daemon lived."""

    process: EngineProcess
    record: ExitRecord


@dataclass(frozen=True)
class ConfigRead:
    """The configuration was read again, and makes sense."""

    operation: str
    config: Config


@dataclass(frozen=True)
class Spawned:
    """The engine's process exists. `spec` None: its binary does not tell what it was asked for."""

    generation: int
    process: EngineProcess
    spec: EngineSpec | None = None


@dataclass(frozen=True)
class SpawnFailed:
    """There is no process. `jitter` from [0, 1). `final`: another try would end like this one."""

    generation: int
    problem: Problem
    jitter: float
    final: bool = False


@dataclass(frozen=True)
class Moved:
    """The load made progress: the engine wrote something, or used processor or disk."""

    generation: int


@dataclass(frozen=True)
class Listens:
    """The engine that loads answers: whoever connects to its port is refused no more."""

    generation: int


@dataclass(frozen=True)
class Healthy:
    """The engine is healthy and proven to be ours."""

    generation: int
    facts: EngineFacts
    at: datetime


@dataclass(frozen=True)
class Observed:
    """What an engine that serves says of itself, asked at `asked_at` on the daemon's clock.

    `wake_s`: how long it loaded its weights, when a load after a sleep was seen from end to end.
    `problem`: what is wrong with its private socket, where something is.
    """

    generation: int
    facts: EngineFacts
    asked_at: float
    at: datetime
    wake_s: float | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class Wedged:
    """The engine gets nowhere. The problem has the evidence."""

    generation: int
    problem: Problem


@dataclass(frozen=True)
class SocketGone:
    """Nobody listens on the engine's private socket, and the process lives."""

    generation: int
    problem: Problem
    at: datetime


@dataclass(frozen=True)
class HolderLost:
    """The holder was killed; the engine lives on without a log and without an exit status."""

    generation: int


@dataclass(frozen=True)
class HolderLooked:
    """The holder was looked at: the problem with it, or None where there is none any more."""

    generation: int
    problem: Problem | None


@dataclass(frozen=True)
class Exited:
    """The engine's process is gone. `jitter` from [0, 1)."""

    generation: int
    record: ExitRecord
    jitter: float


@dataclass(frozen=True)
class LastWords:
    """The holder told late how the engine ended, when `told` had been said of it already."""

    told: ExitRecord
    record: ExitRecord


@dataclass(frozen=True)
class Reconfigured:
    """The engine answered a reconfigure with a receipt."""

    generation: int
    change: ReconfigureRequest
    receipt: Receipt
    by: str
    at: datetime


@dataclass(frozen=True)
class ReconfigureFailed:
    """The engine declined a reconfigure, or gave no answer that counts."""

    generation: int
    problem: Problem


@dataclass(frozen=True)
class CarryMoved:
    """Conversations are being carried: how far that is, and what would be left if it ended now.

    `is_drained`: no request is under way any more in the engine that they come from.
    """

    generation: int
    progress: str
    report: CarryReport
    is_drained: bool = False


@dataclass(frozen=True)
class CarriedOut:
    """All that could be written of an engine is in files; it is quiet."""

    generation: int
    report: CarryReport


@dataclass(frozen=True)
class CarriedIn:
    """All that goes into an engine is there, and requests wait no more."""

    generation: int
    report: CarryReport
    facts: EngineFacts
    at: datetime


@dataclass(frozen=True)
class PageEnded:
    """The engine answered a page verb, declined it, or gave no answer that counts."""

    operation: str
    outcome: PageReceipt | FileReceipt | Problem


@dataclass(frozen=True)
class Left:
    """The run of this id has ended, or has hung up; it may never have owned anything."""

    run: str


@dataclass(frozen=True)
class Pressure:
    """The machine or our cgroup is short of memory."""


@dataclass(frozen=True)
class Planned:
    """What an apply comes to was found out, or why it cannot be."""

    operation: str
    plan: ApplyPlan | Problem


@dataclass(frozen=True)
class Rebased:
    """What an apply's binary takes its new `request` for, or why it does not."""

    operation: str
    request: UpRequest
    spec: EngineSpec | Problem


@dataclass(frozen=True)
class HandOver:
    """The daemon is to end and leave the engine to the next one."""


@dataclass(frozen=True)
class LookedForFiles:
    """Whether the files that a given-up engine lacked are there, of which `generation` was last."""

    generation: int
    there: bool


@dataclass(frozen=True)
class ConfigBroken:
    """The configuration was read again, and makes none."""

    operation: str
    problem: Problem


@dataclass(frozen=True)
class Tick:
    """The snapshot's deadline may have passed."""


PageVerb = Page | PageFile
Command = Up | Run | Start | Stop | Restart | Down | Reconfigure | Apply | Reload | PageVerb
StartingFact = (
    Spawned | SpawnFailed | Moved | Listens | Healthy | SocketGone | HolderLost | HolderLooked
)
RunningFact = Observed | Wedged | Exited | Reconfigured | ReconfigureFailed
CarryFact = CarryMoved | CarriedOut | CarriedIn
ProcessFact = StartingFact | RunningFact | CarryFact
ConfigFact = ConfigRead | ConfigBroken
Event = (
    Command
    | ProcessFact
    | ConfigFact
    | Planned
    | Rebased
    | PageEnded
    | Left
    | Pressure
    | LastWords
    | Resume
    | Found
    | FoundDead
    | HandOver
    | LookedForFiles
    | Tick
)


# --- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spawn:
    """Start holder and engine. What is saved before it says what was intended."""

    generation: int
    instance_id: str
    request: UpRequest
    override: Override | None


@dataclass(frozen=True)
class LookForFiles:
    """Look whether the files are there by now that the engine needs. Nothing is started."""

    generation: int
    request: UpRequest


@dataclass(frozen=True)
class Watch:
    """Wait for the process's end, and meanwhile for its health."""

    generation: int
    process: EngineProcess


@dataclass(frozen=True)
class Signal:
    """Signal this process and no other."""

    process: EngineProcess
    step: Ladder


@dataclass(frozen=True)
class SendReconfigure:
    """Ask the engine for another geometry."""

    generation: int
    process: EngineProcess
    operation: str
    change: ReconfigureRequest


@dataclass(frozen=True)
class PlanApply:
    """Find out what an apply comes to: whether there is memory, what becomes of conversations.

    `process`, `running` and `running_spec`: the engine, what it was asked to be, and what its
    binary took that for; `drain_s` as in the settings.
    """

    command: Apply
    plan: ApplyPlan
    process: EngineProcess | None
    running: UpRequest | None
    running_spec: EngineSpec | None
    drain_s: float


@dataclass(frozen=True)
class Rebase:
    """Ask an apply's binary what it takes this `request` for: what it was on top of is another."""

    operation: str
    request: UpRequest


@dataclass(frozen=True)
class SendPage:
    """Ask the engine for a page verb; it may wait until the slot is free."""

    process: EngineProcess
    command: PageVerb


@dataclass(frozen=True)
class CarryOut:
    """Have the engine be quiet and write what it holds. Not `may_lose`: all of it or nothing.

    `to` is then the engine that is to take it.
    """

    generation: int
    process: EngineProcess
    request: UpRequest
    may_lose: bool
    to: UpRequest | None = None


@dataclass(frozen=True)
class CarryCut:
    """Give requests under way no more time: they are cut, and what they hold is written."""

    generation: int


@dataclass(frozen=True)
class CarryIn:
    """Bring back what files hold into an engine that is quiet since its start, then let it go."""

    generation: int
    process: EngineProcess
    request: UpRequest


@dataclass(frozen=True)
class CarryOff:
    """The engine goes on serving with what it holds: no request waits, no file holds it as well."""

    process: EngineProcess
    request: UpRequest


@dataclass(frozen=True)
class ReadConfig:
    """Read the configuration again."""

    operation: str


@dataclass(frozen=True)
class UseSettings:
    """From now on these settings hold."""

    settings: Settings


@dataclass(frozen=True)
class Finish:
    """The operation succeeded."""

    operation: str
    result: OperationResult


@dataclass(frozen=True)
class Fail:
    """The operation failed."""

    operation: str
    problem: Problem


@dataclass(frozen=True)
class Reject:
    """The command is not accepted; its operation never existed."""

    operation: str
    problem: Problem


@dataclass(frozen=True)
class RecordLoad:
    """Weights were loaded, or a load was tried. `load_s` None: nobody saw how long it took.

    `dropped`: the live geometry that a crash has put in doubt, and that this load is without.
    `aborted`: it was stopped midway. `reasons`: fields that kept the engine before it from being
    changed live. `by` None: whoever the engine was loaded for, or a request.
    `port_closed_s`: for how long nobody listened before it.
    """

    generation: int
    cause: LoadCause
    load_s: float | None
    loaded: bool
    spec: EngineRequest
    dropped: Override | None = None
    by: str | None = None
    aborted: bool = False
    reasons: tuple[str, ...] = ()
    port_closed_s: float | None = None


@dataclass(frozen=True)
class RecordCrash:
    """The engine ended and nobody had asked for it. `cause` is why it had been loaded.

    What is in `api_key_file` is kept out of the record.
    """

    generation: int
    process: EngineProcess
    cause: LoadCause
    facts: EngineFacts
    override: Override | None
    problem: Problem
    record: ExitRecord
    api_key_file: str | None


@dataclass(frozen=True)
class RecordAvoided:
    """A load was avoided by a reconfigure."""

    receipt: Receipt
    by: str


@dataclass(frozen=True)
class RecordCarried:
    """Conversations were written to files, or brought back."""

    way: Way
    report: CarryReport


@dataclass(frozen=True)
class RecordLeft:
    """A run had left its engine, which has come to this."""

    by: str
    outcome: Departure
    lingered_s: float


@dataclass(frozen=True)
class RecordLost:
    """The daemon before this one died over an apply, which has come to this."""

    lost: LostApply


@dataclass(frozen=True)
class Tell:
    """Say this to a run."""

    run: str
    message: RunMessage


@dataclass(frozen=True)
class Exit:
    """Nothing is left to supervise; the daemon ends."""


Told = Finish | Fail | Reject | Tell

Record = RecordLoad | RecordCrash | RecordAvoided | RecordCarried | RecordLeft | RecordLost

Effect = (
    Spawn
    | LookForFiles
    | Watch
    | Signal
    | SendReconfigure
    | PlanApply
    | Rebase
    | SendPage
    | CarryOut
    | CarryIn
    | CarryCut
    | CarryOff
    | ReadConfig
    | UseSettings
    | Told
    | Record
    | Exit
)
