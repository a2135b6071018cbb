"""Runs cells after each other, as far as the budget goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
from llamactl_validate.expecting import Failed, Skipped, undisguised

from llamactl_bench import grid
from llamactl_bench.cell import Cell, Outcome
from llamactl_bench.machine import Watch
from llamactl_bench.measure import measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from llamactl_bench.cell import Machine
    from llamactl_bench.measure import Subject
    from llamactl_bench.record import Record


def run(
    cells: Iterable[Cell],
    subject: Subject,
    record: Record,
    speed: grid.Speed,
    budget: grid.Budget,
    here: Machine,
    told: Callable[[Cell, str], None],
) -> Iterator[Outcome]:
    """Yield what was found in each cell, on this machine as it was found here.

    A cell that does not fit into the budget is left out, and a smaller one after it may fit. An
    interrupt goes through: it costs the cell that is being measured.
    """
    for cell in cells:
        estimated_s = grid.estimate_s(cell, speed)
        if not budget.fits(estimated_s):
            continue
        watch = Watch()
        outcome = _measured(cell, subject, told).model_copy(
            update={
                "machine": here,
                "others": watch.others(),
                "swapped_bytes": watch.swapped_bytes(),
                "took_s": watch.took_s,
            }
        )
        if outcome.why_not == "":
            budget.spend(estimated_s, outcome.took_s)
        if not outcome.failed:
            record.add(outcome)
        yield outcome


def _measured(cell: Cell, subject: Subject, told: Callable[[Cell, str], None]) -> Outcome:
    """Measure it; an engine that dies or hangs costs this cell alone."""
    step = ""

    def tell(now: str) -> None:
        nonlocal step
        step = now
        told(cell, now)

    try:
        tell("engines start")
        with undisguised():
            return measure(cell, subject, tell)
    except Skipped as exc:
        return Outcome(cell=cell, why_not=str(exc))
    except Failed as exc:
        why = str(exc)
    except (httpx.HTTPError, OSError, TimeoutError) as exc:
        why = f"the engine does not answer ({type(exc).__name__}: {exc})"
    except (LookupError, TypeError, ValueError) as exc:
        why = f"the engine's answer makes no sense ({type(exc).__name__}: {exc})"
    return Outcome(cell=cell, why_not=f"{step}: {why}", failed=True)
