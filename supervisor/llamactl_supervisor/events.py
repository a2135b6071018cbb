"""What can happen to the engine and what the daemon can do about it; `state.reduce` joins the two.

Every fact about a process carries the generation of that process, so that one which arrives late
is recognised as old.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - dataclass fields
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from llamactl_supervisor.models import (
    EngineRequest,
    ExitRecord,
    FileReceipt,
    Geometry,
    OperationKind,
    OperationResult,
    Override,
    PageReceipt,
    Problem,
    ProcessIdentity,
    Receipt,
    ReconfigureRequest,
    UpRequest,
    Wire,
)
from llamactl_supervisor.progress import Answer

if TYPE_CHECKING:
    from llamactl_supervisor.config import Config
    from llamactl_supervisor.settings import Settings


class EngineProcess(Wire):
    """One engine and its holder. `holder` None: it was killed and the engine lives on."""

    instance_id: str
    engine: ProcessIdentity
    holder: ProcessIdentity | None
    adopted: bool = False


@dataclass(frozen=True)
class EngineFacts:
    """What the engine said about itself when last asked."""

    geometry: Geometry | None = None
    n_weight_loads: int | None = None
    last_reconfigure: Receipt | None = None
    work: Answer = field(default_factory=Answer)


class LoadCause(StrEnum):
    """Why weights were loaded."""

    UP = "up"
    START = "start"
    RESTART = "restart"
    RESUME = "resume"
    CRASH = "crash"
    WEDGE = "wedge"
    ADOPT = "adopt"
    WAKE = "wake"
    CONFIG = "config"


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
class Stop:
    """Stop the engine."""

    operation: str


@dataclass(frozen=True)
class Restart:
    """Stop the engine and load it again."""

    operation: str


@dataclass(frozen=True)
class Down:
    """Stop the engine, then the daemon."""

    operation: str


@dataclass(frozen=True)
class Reconfigure:
    """Change the live geometry."""

    operation: str
    change: ReconfigureRequest


@dataclass(frozen=True)
class Reload:
    """Read the configuration again and follow it."""

    operation: str


@dataclass(frozen=True)
class Page:
    """Take a conversation out of a slot or into one, or drop it: PAGE_OUT, PAGE_IN, PAGE_DROP."""

    operation: str
    kind: OperationKind
    name: str
    slot: int = 0

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
    """

    config: Config | None = None
    load: bool = True


@dataclass(frozen=True)
class Found:
    """The daemon is new and the engine of its predecessor runs and is proven ours."""

    process: EngineProcess
    config: Config | None = None


@dataclass(frozen=True)
class ConfigRead:
    """The configuration was read again, and makes sense."""

    operation: str
    config: Config


@dataclass(frozen=True)
class Spawned:
    """The engine's process exists."""

    generation: int
    process: EngineProcess


@dataclass(frozen=True)
class SpawnFailed:
    """There is no process. `jitter` from [0, 1). `final`: another try would end like this one."""

    generation: int
    problem: Problem
    jitter: float
    final: bool = False


@dataclass(frozen=True)
class Moved:
    """The load made progress: the engine wrote something."""

    generation: int


@dataclass(frozen=True)
class Healthy:
    """The engine is healthy and proven to be ours."""

    generation: int
    facts: EngineFacts
    at: datetime


@dataclass(frozen=True)
class Observed:
    """What an engine that serves says of itself, asked at `asked_at` on the monotonic clock.

    `wake_s`: how long it loaded its weights, when a load after a sleep was seen from end to end.
    """

    generation: int
    facts: EngineFacts
    asked_at: float
    at: datetime
    wake_s: float | None = None


@dataclass(frozen=True)
class Wedged:
    """The engine gets nowhere. The problem has the evidence."""

    generation: int
    problem: Problem


@dataclass(frozen=True)
class HolderLost:
    """The holder was killed; the engine lives on without a log and without an exit status."""

    generation: int


@dataclass(frozen=True)
class Exited:
    """The engine's process is gone. `jitter` from [0, 1)."""

    generation: int
    record: ExitRecord
    jitter: float


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
class PageEnded:
    """The engine answered a page verb, declined it, or gave no answer that counts."""

    operation: str
    outcome: PageReceipt | FileReceipt | Problem


@dataclass(frozen=True)
class HandOver:
    """The daemon is to end and leave the engine to the next one."""


@dataclass(frozen=True)
class ConfigBroken:
    """The configuration was read again, and makes none."""

    operation: str
    problem: Problem


@dataclass(frozen=True)
class Tick:
    """The snapshot's deadline may have passed."""


PageVerb = Page | PageFile
Command = Up | Start | Stop | Restart | Down | Reconfigure | Reload | PageVerb
StartingFact = Spawned | SpawnFailed | Moved | Healthy | HolderLost
RunningFact = Observed | Wedged | Exited | Reconfigured | ReconfigureFailed
ProcessFact = StartingFact | RunningFact
ConfigFact = ConfigRead | ConfigBroken
Event = Command | ProcessFact | ConfigFact | PageEnded | Resume | Found | HandOver | Tick


# --- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spawn:
    """Start holder and engine. What is saved before it says what was intended."""

    generation: int
    instance_id: str
    request: UpRequest
    override: Override | None


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
class SendPage:
    """Ask the engine for a page verb; it may wait until the slot is free."""

    process: EngineProcess
    command: PageVerb


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
    """

    generation: int
    cause: LoadCause
    load_s: float | None
    loaded: bool
    spec: EngineRequest
    dropped: Override | None = None


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
class Exit:
    """Nothing is left to supervise; the daemon ends."""


Effect = (
    Spawn
    | Watch
    | Signal
    | SendReconfigure
    | SendPage
    | ReadConfig
    | UseSettings
    | Finish
    | Fail
    | Reject
    | RecordLoad
    | RecordCrash
    | RecordAvoided
    | Exit
)
