"""What the engine says: its geometry, its receipts, and what it holds."""

from __future__ import annotations

from typing import Literal

from llamactl_supervisor.models.base import EngineDocument, Problem, Wire
from llamactl_supervisor.models.carried import CarriedConversation

ENGINE_READ_S = 120.0
"""How long a read may take that the engine answers in its turn: it may have to load its weights."""


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
    """What became of one slot's conversation; of one that was placed, `from` is the slot it had."""

    slot: int
    tokens: int = 0
    fate: str = ""

    @property
    def other_slot(self) -> int | None:
        """The slot that it had before it was parked, where it is in another one now."""
        home = (self.model_extra or {}).get("from")
        return home if isinstance(home, int) and home != self.slot else None


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


class Quiet(EngineDocument):
    """The engine's answer to the demand to be quiet: what goes on, what waits, what was ended."""

    is_quiet: bool
    n_processing: int = 0
    n_waiting: int = 0
    n_cut: int = 0


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
    """A conversation in host memory. `running`: a request waits for it to be placed back.

    A `parked` one is placed back by a change that has room for it, into `slot` if that is free.
    """

    name: str
    n_tokens: int
    n_bytes: int
    n_checkpoints: int = 0
    age_s: float = 0.0
    parked: bool = False
    running: bool = False
    slot: int | None = None


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
    """The engine's pages, and what files hold that it did not take, by the name of its file."""

    pages: tuple[Page, ...]
    left: tuple[CarriedConversation, ...] = ()


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
