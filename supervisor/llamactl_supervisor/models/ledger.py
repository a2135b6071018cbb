"""The lines of the ledger: weight loads, loads that were avoided, conversations carried over."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from llamactl_supervisor.fields import RequestedCtx
from llamactl_supervisor.models.base import Problem, Wire
from llamactl_supervisor.models.carried import CarriedConversation
from llamactl_supervisor.models.engine import Geometry
from llamactl_supervisor.models.operation import LostApply
from llamactl_supervisor.models.run import Departure
from llamactl_supervisor.models.status import Override


class LoadLine(Wire):
    """Weights were loaded, or (`loaded` false) a load was tried and failed after `load_s`.

    `aborted`: it did not fail but was stopped, for somebody wanted no engine any more.
    `load_s` null: nobody saw it. `dropped`: the live geometry that a crash soon after it has put
    in doubt; the load is of the one before. `reasons`: the fields for which it took the place of an
    engine that could not be changed live.
    `port_closed_s`: from the TERM of the engine before it, in whose place it is, until this one
    listened: connections were refused for that long.
    """

    v: Literal[1] = 1
    kind: Literal["load"] = "load"
    at: AwareDatetime
    generation: int
    cause: str
    by: str
    loaded: bool
    aborted: bool = False
    load_s: float | None
    port_closed_s: float | None = None
    model: str
    model_bytes: int | None
    n_ctx: RequestedCtx
    n_seq: int
    dropped: Override | None = None
    reasons: tuple[str, ...] = ()


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


class CarriedLine(Wire):
    """Conversations were written to files before their engine ended, or brought into the next.

    `problem`: why that did not come to its end.
    """

    v: Literal[1] = 1
    kind: Literal["carried"] = "carried"
    at: AwareDatetime
    way: Literal["out", "in"]
    by: str
    took_s: float
    quiet_s: float
    n_bytes: int
    conversations: tuple[CarriedConversation, ...]
    problem: Problem | None = None


class LeftLine(Wire):
    """A run has left its engine, which then lingered for `lingered_s` and came to `outcome`."""

    v: Literal[1] = 1
    kind: Literal["left"] = "left"
    at: AwareDatetime
    by: str
    outcome: Departure
    lingered_s: float


class LostLine(LostApply):
    """A daemon had accepted an apply, and died before it ended: what the next one found of it."""

    v: Literal[1] = 1
    kind: Literal["lost"] = "lost"
    at: AwareDatetime


LedgerLine = Annotated[
    LoadLine | AvoidedLine | LeftLine | CarriedLine | LostLine, Field(discriminator="kind")
]


class Totals(Wire):
    """Sums over the whole ledger."""

    weight_loads: int = 0
    loads_avoided: int = 0


class Ledger(Wire):
    """Lines of the ledger, the newest last, and the sums over all of it.

    `lost`: the lines that the present daemon could not write. `unreadable`: those of the file that
    make no sense, as one does that a crash tore; no sum has them.
    """

    lines: tuple[LedgerLine, ...]
    totals: Totals
    lost: int = 0
    unreadable: int = 0
