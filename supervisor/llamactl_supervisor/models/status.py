"""What the daemon says of itself and of its engine: the state, the process, how it ended."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from llamactl_supervisor.fields import RequestedCtx
from llamactl_supervisor.models.base import Problem, Wire
from llamactl_supervisor.models.configuration import ConfigStatus
from llamactl_supervisor.models.engine import Geometry, Receipt
from llamactl_supervisor.models.operation import FieldChange, LostApply, Operation
from llamactl_supervisor.models.request import EngineRequest, UpRequest
from llamactl_supervisor.models.run import Owner


class EngineState(StrEnum):
    """Where the engine is. CRASHED waits to retry; FAILED gave up and waits for a person."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    RECONFIGURING = "reconfiguring"
    STOPPING = "stopping"
    CRASHED = "crashed"
    FAILED = "failed"


class Intent(StrEnum):
    """What was last asked for, whatever the engine is doing about it."""

    UP = "up"
    DOWN = "down"


class ProcessIdentity(Wire):
    """A process for certain: its pid can be reused, its pid at that tick of that boot cannot."""

    pid: int
    start_ticks: int
    boot_id: str


class EngineProcess(Wire):
    """One engine and its holder. `holder` None: it was killed and the engine lives on."""

    instance_id: str
    engine: ProcessIdentity
    holder: ProcessIdentity | None
    adopted: bool = False


class After(StrEnum):
    """What follows STOPPING."""

    REST = "rest"
    START = "start"
    RETRY = "retry"
    """The load stalled."""
    REPLACE = "replace"
    """It served, and was wedged."""


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
    APPLY = "apply"
    RUN = "run"


class ExitRecord(Wire):
    """How an engine ended. `summary` is one line; both numbers None: the status was lost.

    `reason`: why the daemon ended it, where nobody had asked for that.
    """

    summary: str
    at: datetime
    reason: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    exec_errno: int | None = None
    max_rss_bytes: int | None = None
    cpu_s: float | None = None
    dropped_bytes: int = 0
    last_lines: tuple[str, ...] = ()


class Override(Wire):
    """A geometry that was set live and holds over restarts, with who and when."""

    n_ctx: RequestedCtx
    n_seq: int
    kv_unified: bool | None
    by: str
    at: datetime

    def on(self, spec: EngineRequest) -> EngineRequest:
        """Return what was asked for, with this geometry."""
        geometry = {"n_ctx": self.n_ctx, "n_seq": self.n_seq, "kv_unified": self.kv_unified}
        return spec.model_copy(update=geometry)


class DaemonStatus(Wire):
    """The daemon itself. `problem`: why no client finds its unix socket, where none does."""

    pid: int
    version: str
    started_at: datetime
    control_socket: str
    log_dir: str
    problem: Problem | None = None


class EngineStatus(Wire):
    """The engine's process, while there is one. `holder_pid` None: its holder was killed.

    `log_dropped_bytes`: what it wrote and no disk took.
    """

    pid: int
    holder_pid: int | None
    instance_id: str
    url: str
    socket: str
    adopted: bool
    geometry: Geometry | None = None
    n_weight_loads: int | None = None
    last_reconfigure: Receipt | None = None
    is_sleeping: bool | None = None
    log_dropped_bytes: int = 0


class Stranger(Wire):
    """An engine in our runtime directory that cannot be proven ours: not used, not killed."""

    pid: int
    instance_id: str


class Status(Wire):
    """Everything the daemon knows. `retry_in_s` only in CRASHED; `problem` says why not READY.

    `crashes` are ends that nobody asked for and starts that failed, in a row. Of an engine that
    serves they are the ends before it, and forgotten in `forgotten_in_s`. `crash_record`, as
    long as there are any, is the path of the newest file that tells of such an end.
    `operation` is the oldest that runs; a page verb only where nothing else does. `unapplied` is
    what the running engine or the daemon (`before`) has otherwise than it is configured (`after`).
    `dropped_override` is the live geometry that a crash soon after it has put in doubt; the engine
    has the one before.
    `unsaved` says why the present state is not on disk: the next daemon would go by an older one.
    `ledger_lost` are the lines that this daemon could not write to the ledger. `carrying` says how
    far conversations are that are written to files before a stop, or brought back before READY.
    `in_files` conversations, with `in_files_bytes`, are in files alone: they wait for the next
    engine, or none has taken them so far. `owner` is the run that has the engine; `lingers_s` is
    how long it stays for the next one, where it has none. `lost` are applies that the daemon
    before this one did not finish, until another one has come to its end.
    """

    state: EngineState
    intent: Intent
    generation: int
    crashes: int
    retry_in_s: float | None
    daemon: DaemonStatus
    desired: UpRequest | None
    override: Override | None
    engine: EngineStatus | None
    operation: Operation | None
    problem: Problem | None
    last_exit: ExitRecord | None
    strangers: tuple[Stranger, ...]
    weight_loads: int
    loads_avoided: int
    unapplied: tuple[FieldChange, ...] = ()
    config: ConfigStatus | None = None
    crash_record: str | None = None
    dropped_override: Override | None = None
    unsaved: Problem | None = None
    ledger_lost: int = 0
    carrying: str | None = None
    in_files: int = 0
    in_files_bytes: int = 0
    owner: Owner | None = None
    lingers_s: float | None = None
    forgotten_in_s: float | None = None
    lost: tuple[LostApply, ...] = ()


class _AnyDocument(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class AnyDaemon(_AnyDocument):
    """The daemon itself, whatever its version."""

    pid: int
    version: str


class AnyRequest(_AnyDocument):
    """What it was asked for."""

    engine_path: str | None = None


class AnyStatus(_AnyDocument):
    """The part of a status that is in every version's."""

    daemon: AnyDaemon
    desired: AnyRequest | None = None
