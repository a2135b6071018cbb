"""What the daemon says of a mutation: that it runs, and what it came to."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from llamactl_supervisor.models.base import Problem, Wire
from llamactl_supervisor.models.carried import CarryReport
from llamactl_supervisor.models.engine import FileReceipt, PageReceipt, Receipt


class FieldChange(Wire):
    """A field that is or becomes something else: `engine.n_ctx`, from `before` to `after`."""

    field: str
    before: Any
    after: Any


class PlanField(Wire):
    """A field that forces a relaunch or changes live; null: it is not given.

    `kind`: `live` is the geometry; `context`, `server` and `model` are options of the engine;
    `build` is its binary, `process` what its process is given.
    """

    field: str
    kind: Literal["live", "context", "server", "model", "build", "process"]
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


class Fate(Wire):
    """What becomes of a conversation. `what` is where it is; `n_tokens` null: nobody says.

    `outcome`: it `stays` in memory; it is `parked` there, whole; it is `carried` into the next
    engine; it is `left` in files, which that one does not take; it is `lost`. `fate` says it in
    words, with the reason.
    """

    what: str
    n_tokens: int | None
    outcome: Literal["stays", "parked", "carried", "left", "lost"]
    fate: str


class MemoryNeed(Wire):
    """Bytes of host memory that are needed, and that there are within `limit`; null: not known."""

    needed_bytes: int
    available_bytes: int | None
    limit: str


class ApplyPlan(Wire):
    """What an apply comes to.

    `none`: the engine is like that; `reconfigure`: by `changes`, on the loaded weights;
    `relaunch`: for `reasons`; `start`: it does not run, and is wanted; `store`: it is not wanted,
    its next start is like that. `expected_s` is how long nothing is served, from past ones: the
    pause of a live change, the load of a start, and what carrying took beside it of a relaunch.
    `notes` say what could not be found out.
    """

    action: Literal["none", "reconfigure", "relaunch", "start", "store"]
    reasons: tuple[PlanField, ...] = ()
    changes: tuple[PlanField, ...] = ()
    conversations: tuple[Fate, ...] = ()
    memory: MemoryNeed | None = None
    expected_s: float | None = None
    notes: tuple[str, ...] = ()


class LifecycleOutcome(StrEnum):
    """What up, start, stop, restart or down came to."""

    STARTED = "started"
    ALREADY_UP = "already_up"
    STOPPED = "stopped"
    ALREADY_STOPPED = "already_stopped"


class LifecycleResult(Wire):
    """Result of up, start, stop, restart and down.

    `carried`: what became of the conversations that the engine held, or that files held for it;
    null where there were none. `port_closed_s`: for how long nobody listened on the engine's port
    between an engine and the next, from the TERM of the one to the first answer of the other.
    `slept`: the engine that was ended was asleep, so that its slots held nothing.
    """

    outcome: LifecycleOutcome
    pid: int | None = None
    load_s: float | None = None
    port_closed_s: float | None = None
    carried: CarryReport | None = None
    slept: bool = False


class ApplyResult(Wire):
    """Result of an apply; a dry run is not `applied`, and neither is what was so already.

    `receipt` is the engine's where its geometry changed, `lifecycle` tells of its start.
    `with_operation`: a newer apply, on top of this one, that it was carried out with; all of this
    is of both.
    """

    applied: bool
    plan: ApplyPlan
    receipt: Receipt | None = None
    lifecycle: LifecycleResult | None = None
    with_operation: str | None = None


_CAME_TO = {
    "in_force": "in force all the same",
    "open": "the engine may still make the change",
    "wanted": "not in force; the next start is",
    "lost": "lost, nothing of it is in force",
}


class LostApply(Wire):
    """What came of an apply that a daemon had accepted and of which it did not live to see the end.

    `in_force`: the engine is like that all the same; `open`: it is not, and may still make the
    change; `wanted`: its next start is like that; `lost`: nothing of it is wanted. `differs` names
    what the engine that runs has otherwise.
    """

    operation: str
    by: str
    outcome: Literal["in_force", "open", "wanted", "lost"]
    differs: tuple[PlanField, ...] = ()

    @property
    def came_to(self) -> str:
        """What came of it, as a person reads it."""
        return _CAME_TO[self.outcome]


class OperationKind(StrEnum):
    """The mutations. Those of the engine's life or geometry: one at a time; see `PAGE_KINDS`."""

    UP = "up"
    START = "start"
    STOP = "stop"
    RESTART = "restart"
    DOWN = "down"
    RECONFIGURE = "reconfigure"
    APPLY = "apply"
    RELOAD = "reload"
    RUN = "run"
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
OperationResult = ApplyResult | LifecycleResult | ReloadResult | Receipt | FileReceipt | PageReceipt


class Operation(Wire):
    """One mutation, which survives whoever asked for it. `result` xor `error` once it ended.

    `plan`: what an apply comes to, from when it is carried out on. `warning`: it ended, and the
    state that says so could not be saved.
    """

    id: str
    kind: OperationKind
    state: OperationState
    progress: str = ""
    plan: ApplyPlan | None = None
    requested_by: str
    requested_at: datetime
    finished_at: datetime | None = None
    result: Annotated[OperationResult | None, Field(union_mode="left_to_right")] = None
    error: Problem | None = None
    warning: Problem | None = None
