"""Which cells there is memory for, beside what runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl_validate.preflight import Need, needs, refuse

from llamactl_bench import grid
from llamactl_bench.cell import Cell, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

N_ENGINES = 2
"""Ours, and what it is held against."""


def fitting(
    program: Path, model: Path, cells: Sequence[Cell], *, required: bool
) -> tuple[list[Outcome], tuple[Need, ...]]:
    """Return the cells that are too large for this machine, and what the largest other one takes.

    Raises `does_not_fit` where there is room for none and one is `required`, and what
    `preflight.needs` raises.
    """
    too_large: list[Outcome] = []
    largest: tuple[Need, ...] = ()
    for n_ctx in sorted({each.n_ctx for each in cells}):
        those = [each for each in cells if each.n_ctx == n_ctx]
        most, beside = max(map(grid.largest, those)), max(map(grid.away, those))
        found = needs(program, model, most, beside, n_engines=N_ENGINES)
        short = [need for need in found if not need.fits]
        if not short:
            largest = found
            continue
        if required and not largest:
            refuse(short)
        why = ", ".join(
            f"{need.n_bytes} bytes of {need.what} are needed, {need.there} are there"
            for need in short
        )
        too_large += [Outcome(cell=each, why_not=why) for each in those]
    return too_large, largest
