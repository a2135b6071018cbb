"""One cell of the grid, what was found in it, and on which machine."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Table(StrEnum):
    """What a cell is measured for."""

    RECONFIGURE = "reconfigure"
    """The pause of a change of geometry, beside a copy of the bytes that are held."""
    RELAUNCH = "relaunch"
    """The same change by an end and a start, with slot files and with prompts read again."""
    PAGES = "pages"
    """Ways out of a slot and back, and what a neighbour feels of them."""
    SPEED = "speed"
    """Prefill and decode, ours beside the other engine's."""


class Side(StrEnum):
    """Whose engine."""

    OURS = "ours"
    BASELINE = "baseline"


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Cell(_Kept):
    """So many tokens, evenly in all slots of a context; measured so many times."""

    table: Table
    n_tokens: int = Field(ge=1)
    n_seq: int = Field(ge=1)
    n_ctx: int = Field(ge=1)
    rounds: int = Field(ge=1)

    @property
    def per_slot(self) -> int:
        """Tokens of one conversation."""
        return self.n_tokens // self.n_seq

    def __str__(self) -> str:
        return f"{self.table}: {self.n_tokens} tokens, {self.n_ctx} x {self.n_seq}"


class Machine(_Kept):
    """As it was when a run began."""

    cpu: str
    architecture: str
    cores: int
    memory_bytes: int
    kernel: str
    governor: str | None
    """None: the machine does not tell, as most virtual ones."""
    load_average: float
    """Over the last minute."""
    busy: float
    """The part of the processors' time that was in use, before anything of ours was started."""
    swap_used_bytes: int

    def __str__(self) -> str:
        governor = f"governor {self.governor}" if self.governor else "governor not told"
        return (
            f"{self.cpu} ({self.architecture}), {self.cores} cores, "
            f"{self.memory_bytes / 2**30:.1f} GiB, {self.kernel}, {governor}, "
            f"load average {self.load_average:.2f}, {self.swap_used_bytes / 2**20:.0f} MiB in swap"
        )


class Mark(_Kept):
    """An operation, in ms since the timeline's first token."""

    name: str
    start_ms: float
    end_ms: float


class Timeline(_Kept):
    """When each token of a neighbour came, in ms since the first, and what was done meanwhile."""

    side: Side
    came_ms: tuple[float, ...]
    marks: tuple[Mark, ...]


class Outcome(_Kept):
    """What was found in a cell."""

    cell: Cell
    samples: dict[str, tuple[float, ...]] = {}
    """A value for each round, by a name that ends with the unit."""
    facts: dict[str, float] = {}
    """What does not differ from round to round."""
    timelines: tuple[Timeline, ...] = ()
    why_not: str = ""
    """Why there is nothing; then the rest is empty."""
    failed: bool = False
    """It could not be measured to its end, or something was lost."""
    machine: Machine | None = None
    """None: it was not measured."""
    others: float = 0.0
    """The part of the machine's processor time that went to programs that are not ours."""
    swapped_bytes: int = 0
    """That anyone on the machine wrote to swap meanwhile."""
    took_s: float = 0.0
