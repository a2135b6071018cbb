"""The JSON that crosses our control socket, frozen; the CLI and the daemon share these shapes.

Ours (`Wire`) forbids unknown keys. What the engine says (`EngineDocument`) keeps them, because a
receipt is passed on as it came.
"""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 - pydantic reads the annotations at run time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from llamactl_supervisor.errors import error
from llamactl_supervisor.fields import DEFAULT_HOST as DEFAULT_HOST
from llamactl_supervisor.fields import DEFAULT_N_CTX as DEFAULT_N_CTX
from llamactl_supervisor.fields import DEFAULT_N_SEQ as DEFAULT_N_SEQ
from llamactl_supervisor.fields import DEFAULT_PORT as DEFAULT_PORT
from llamactl_supervisor.fields import N_CTX_MAX as N_CTX_MAX
from llamactl_supervisor.fields import N_CTX_MIN as N_CTX_MIN
from llamactl_supervisor.fields import N_SEQ_MAX as N_SEQ_MAX
from llamactl_supervisor.fields import PAGE_NAME_MAX as PAGE_NAME_MAX
from llamactl_supervisor.fields import PORT_MAX as PORT_MAX
from llamactl_supervisor.fields import (
    AbsolutePath,
    ExtraArgs,
    FileName,
    Host,
    NCtx,
    NSeq,
    PageName,
    Port,
    Slot,
    validation_error,
)
from llamactl_supervisor.fields import parse_tokens as parse_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.errors import LlamactlError


ENGINE_READ_S = 120.0
"""How long a read may take that the engine answers in its turn: it may have to load its weights."""


class Wire(BaseModel):
    """Base of our own shapes: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Validate `data`; raise a `LlamactlError` that names the first bad field."""
        try:
            return cls.model_validate(data)
        except ValidationError as exc:
            raise validation_error(exc.errors(include_url=False, include_input=True)) from None


class EngineDocument(BaseModel):
    """Base of what llama-server says: frozen, unknown keys are kept and passed on."""

    model_config = ConfigDict(frozen=True, extra="allow")


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


class Problem(Wire):
    """The one shape of an error. `code` is stable, `message` is for people."""

    code: str
    message: str
    hint: str | None = None
    details: dict[str, Any] = {}

    @classmethod
    def of(cls, exc: LlamactlError) -> Self:
        """Return the wire form of `exc`."""
        return cls(code=exc.code, message=exc.message, hint=exc.hint, details=exc.details)

    def to_error(self) -> LlamactlError:
        """Return the exception of the class that belongs to the code."""
        return error(self.code, self.message, hint=self.hint, details=self.details)


class EngineOptions(Wire):
    """What may be asked of an engine whatever its model."""

    n_ctx: NCtx = DEFAULT_N_CTX
    """Context in tokens, in total over all slots. Changes live."""
    n_seq: NSeq = DEFAULT_N_SEQ
    """Slots: conversations at once. Changes live."""
    kv_unified: bool | None = None
    """One pool for all slots, or a part of it for each; else as the engine does. Changes live."""
    host: Host = DEFAULT_HOST
    """Where clients may come from: an IPv4 address of this machine."""
    port: Port = DEFAULT_PORT
    """TCP port for the clients."""
    extra_args: ExtraArgs = ()
    """Further options of llama-server."""
    api_key_file: AbsolutePath | None = None
    """File with the keys that clients must present."""


class EngineRequest(EngineOptions):
    """The engine that is wanted. n_ctx is the total over all slots."""

    model: AbsolutePath


class UpRequest(Wire):
    """Run this engine with this llama-server binary."""

    spec: EngineRequest
    engine_path: AbsolutePath


class EngineConfig(EngineOptions):
    """The engine as it is configured; without a model it is a part of what `up` asks for."""

    model: AbsolutePath | None = None
    """GGUF file. With it the daemon brings the engine up when it starts."""
    engine_path: AbsolutePath | None = None
    """The llama-server that is run; default: `up` builds one, the daemon takes the last one."""

    @classmethod
    def of(cls, request: UpRequest) -> Self:
        """Return the configuration that asks for this very engine."""
        return cls(**request.spec.model_dump(), engine_path=request.engine_path)

    def request(self, engine_path: str | None = None) -> UpRequest | None:
        """Return the whole request, None where it is not whole."""
        path = self.engine_path or engine_path
        if self.model is None or path is None:
            return None
        spec = EngineRequest.model_validate(self.model_dump(exclude={"engine_path"}))
        return UpRequest(spec=spec, engine_path=path)


class ReconfigureRequest(Wire):
    """Change the live geometry; a field left out keeps its effective value."""

    n_ctx: NCtx | None = None
    n_seq: NSeq | None = None
    kv_unified: bool | None = None
    dry_run: bool = False


class Geometry(EngineDocument):
    """An engine's effective geometry. n_ctx is the total, n_ctx_slot what a request may use."""

    n_ctx: int
    n_seq: int
    n_ctx_seq: int | None = None
    n_ctx_slot: int | None = None
    kv_unified: bool | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None


class SlotFate(EngineDocument):
    """What became of one slot's conversation."""

    slot: int
    tokens: int = 0
    fate: str = ""


class ParkedSlot(EngineDocument):
    """A conversation that the new geometry cannot hold; it is kept whole."""

    slot: int
    tokens_held: int = 0
    tokens_fit: int = 0
    reason: str = ""
    running: bool = False


class Receipt(EngineDocument):
    """The engine's own account of one reconfigure; pause_ms is the time without a token.

    `bytes_needed` is what the new contexts take, by device.
    """

    outcome: Literal["applied", "unchanged", "planned"]
    previous: Geometry
    geometry: Geometry
    pause_ms: float = 0.0
    phases_ms: dict[str, float] = {}
    outside_pause_ms: dict[str, float] = {}
    tokens_held: int = 0
    bytes_held: int = 0
    slots: tuple[SlotFate, ...] = ()
    parked: tuple[ParkedSlot, ...] = ()
    n_weight_loads: int | None = None
    bytes_needed: dict[str, int] = {}


class PageDropRequest(Wire):
    """The page that is freed. What a name is, the engine says."""

    name: PageName


class PageRequest(PageDropRequest):
    """The page, and the slot that it comes out of or goes into."""

    slot: Slot


class PageSpillRequest(PageDropRequest):
    """The page that is written to files; `filename` None: they have its name."""

    filename: FileName | None = None
    drop: Annotated[bool, Field(strict=True)] = False


class PageFileRequest(Wire):
    """The files, and the slot that they are written from or go into."""

    filename: FileName
    slot: Slot


class PageReceipt(EngineDocument):
    """The engine's own account of one page verb; `n_reusable` only where a page went in."""

    id_slot: int
    page: str
    n_tokens: int
    n_bytes: int
    n_checkpoints: int = 0
    n_reusable: int | None = None
    ms: float = 0.0


class FileTimings(EngineDocument):
    """How long a save or a restore took."""

    save_ms: float | None = None
    restore_ms: float | None = None


class LostFile(EngineDocument):
    """A part of a page that its files did not give back; what it is good for begins anew."""

    file: str
    why: str


class FileReceipt(EngineDocument):
    """The engine's own account of one verb with files; what it did not say is None.

    A spill says `page`, `dropped` and `ms`; a restore `n_reusable` and `lost`; save and restore
    `timings`. n_bytes is what the conversation has in memory, the files have n_written or n_read.
    """

    id_slot: int
    filename: str
    n_tokens: int
    n_bytes: int
    n_checkpoints: int = 0
    page: str | None = None
    dropped: bool | None = None
    n_written: int | None = None
    n_read: int | None = None
    n_reusable: int | None = None
    lost: tuple[LostFile, ...] | None = None
    ms: float | None = None
    timings: FileTimings | None = None

    @property
    def took_ms(self) -> float | None:
        """How long the verb took, wherever it said so."""
        timings = self.timings or FileTimings()
        said = (self.ms, timings.save_ms, timings.restore_ms)
        return next((value for value in said if value is not None), None)


class Page(EngineDocument):
    """A conversation in host memory. `running`: a request waits for it to be placed back."""

    name: str
    n_tokens: int
    n_bytes: int
    n_checkpoints: int = 0
    age_s: float = 0.0
    parked: bool = False
    running: bool = False


class SlotState(EngineDocument):
    """A slot, or a parked one: that is in no slot but in `page`, and `id` is where it was.

    The engine does not say how many tokens a slot holds that has had no request yet.
    """

    id: int
    n_ctx: int
    is_processing: bool = False
    n_prompt_tokens: int | None = None
    parked: bool = False
    page: str | None = None


class Pages(Wire):
    """The engine's pages."""

    pages: tuple[Page, ...]


class Slots(Wire):
    """The engine's slots, then the parked ones."""

    slots: tuple[SlotState, ...]


class EngineLook(Wire):
    """What the engine holds now, asked without waking it or waiting for it.

    `slots` None: it sleeps, or `problem` says why they are not known (a long batch, `--no-slots`).
    """

    asleep: bool
    slots: tuple[SlotState, ...] | None
    pages: tuple[Page, ...]
    problem: Problem | None = None


class ProcessIdentity(Wire):
    """A process for certain: its pid can be reused, its pid at that tick of that boot cannot."""

    pid: int
    start_ticks: int
    boot_id: str


class ExitRecord(Wire):
    """How an engine ended. `summary` is one line; both numbers None: the status was lost."""

    summary: str
    at: datetime
    exit_code: int | None = None
    signal: int | None = None
    exec_errno: int | None = None
    max_rss_bytes: int | None = None
    cpu_s: float | None = None
    dropped_bytes: int = 0
    last_lines: tuple[str, ...] = ()


class Override(Wire):
    """A geometry that was set live and holds over restarts, with who and when."""

    n_ctx: int
    n_seq: int
    kv_unified: bool | None
    by: str
    at: datetime


class FieldChange(Wire):
    """A field that is or becomes something else: `engine.n_ctx`, from `before` to `after`."""

    field: str
    before: Any
    after: Any


class ReloadResult(Wire):
    """What reading the configuration again came to.

    `applied`: the fields that changed and are in force (without an engine: at its next start).
    `needs_restart`: fields that differ from what runs until the engine (`engine.`) or the daemon
    is restarted. `receipt`: the engine's, where its geometry changed. `unchanged`: nothing was new.
    """

    applied: tuple[FieldChange, ...] = ()
    needs_restart: tuple[FieldChange, ...] = ()
    receipt: Receipt | None = None
    unchanged: bool


class LifecycleOutcome(StrEnum):
    """What up, start, stop, restart or down came to."""

    STARTED = "started"
    ALREADY_UP = "already_up"
    STOPPED = "stopped"
    ALREADY_STOPPED = "already_stopped"


class LifecycleResult(Wire):
    """Result of up, start, stop, restart and down."""

    outcome: LifecycleOutcome
    pid: int | None = None
    load_s: float | None = None


class OperationKind(StrEnum):
    """The mutations. Those of the engine's life or geometry: one at a time; see `PAGE_KINDS`."""

    UP = "up"
    START = "start"
    STOP = "stop"
    RESTART = "restart"
    DOWN = "down"
    RECONFIGURE = "reconfigure"
    RELOAD = "reload"
    PAGE_OUT = "page_out"
    PAGE_IN = "page_in"
    PAGE_DROP = "page_drop"
    PAGE_SPILL = "page_spill"
    PAGE_SAVE = "page_save"
    PAGE_RESTORE = "page_restore"


PAGE_KINDS = frozenset(
    [
        *(OperationKind.PAGE_OUT, OperationKind.PAGE_IN, OperationKind.PAGE_DROP),
        *(OperationKind.PAGE_SPILL, OperationKind.PAGE_SAVE, OperationKind.PAGE_RESTORE),
    ]
)
"""Run beside each other and beside a reconfigure: the engine puts them in order."""


class OperationState(StrEnum):
    """An operation ends exactly once."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


# In this order: what a spill says is a page's receipt as well, and more.
OperationResult = LifecycleResult | ReloadResult | Receipt | FileReceipt | PageReceipt


class Operation(Wire):
    """One mutation, which survives whoever asked for it. `result` xor `error` once it ended."""

    id: str
    kind: OperationKind
    state: OperationState
    progress: str = ""
    requested_by: str
    requested_at: datetime
    finished_at: datetime | None = None
    result: Annotated[OperationResult | None, Field(union_mode="left_to_right")] = None
    error: Problem | None = None


class DaemonStatus(Wire):
    """The daemon itself."""

    pid: int
    version: str
    started_at: datetime
    control_socket: str
    log_dir: str


class EngineStatus(Wire):
    """The engine's process, while there is one. `holder_pid` None: its holder was killed."""

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


class Stranger(Wire):
    """An engine in our runtime directory that cannot be proven ours: not used, not killed."""

    pid: int
    instance_id: str


class Status(Wire):
    """Everything the daemon knows. `retry_in_s` only in CRASHED; `problem` says why not READY.

    `operation` is the oldest that runs; a page verb only where nothing else does. `unapplied` is
    what the running engine (`before`) has otherwise than it is configured (`after`). `crash_record`
    is the path of the newest file that tells of an end nobody asked for. `dropped_override` is the
    live geometry that a crash soon after it has put in doubt; the engine has the one before.
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
    crash_record: str | None = None
    dropped_override: Override | None = None


class LoadLine(Wire):
    """Weights were loaded, or (`loaded` false) a load was tried and failed after `load_s`.

    `load_s` null: nobody saw it. `dropped`: the live geometry that a crash soon after it has put
    in doubt; the load is of the one before.
    """

    v: Literal[1] = 1
    kind: Literal["load"] = "load"
    at: AwareDatetime
    generation: int
    cause: str
    by: str
    loaded: bool
    load_s: float | None
    model: str
    model_bytes: int | None
    n_ctx: int
    n_seq: int
    dropped: Override | None = None


class AvoidedLine(Wire):
    """A reconfigure took the place of a relaunch."""

    v: Literal[1] = 1
    kind: Literal["avoided"] = "avoided"
    at: AwareDatetime
    by: str
    pause_ms: float
    tokens_held: int
    previous: Geometry
    geometry: Geometry


LedgerLine = Annotated[LoadLine | AvoidedLine, Field(discriminator="kind")]


class Totals(Wire):
    """Sums over the whole ledger."""

    weight_loads: int = 0
    loads_avoided: int = 0


class Ledger(Wire):
    """Lines of the ledger, the newest last, and the sums over all of it."""

    lines: tuple[LedgerLine, ...]
    totals: Totals
