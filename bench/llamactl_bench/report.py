"""All that came of a run: for people, as Markdown, and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl_bench.machine import doubts
from llamactl_bench.tables import Shown, tables

if TYPE_CHECKING:
    from llamactl_bench.cell import Machine, Outcome

SPREAD = "medians, and in brackets the first and third quartile, of the rounds of one run"


@dataclass(frozen=True)
class Report:
    """Of one model on one machine."""

    model: str
    engine: str
    baseline: str
    against: str
    """What the baseline is, in words."""
    outcomes: tuple[Outcome, ...]
    n_cells: int
    """Those that were wanted."""
    took_s: float
    """Of all cells, also of those of a run before."""
    interrupted: bool = False
    """Before its end: those that are left were to be measured."""

    @property
    def n_left(self) -> int:
        """How many cells the budget had no room for, or an interrupt came before."""
        return self.n_cells - len(self.outcomes)

    @property
    def measured(self) -> list[Outcome]:
        """Those with numbers."""
        return [each for each in self.outcomes if each.samples]

    @property
    def failed(self) -> list[Outcome]:
        """Those that could not be measured to their end."""
        return [each for each in self.outcomes if each.failed]

    @property
    def machines(self) -> list[Machine]:
        """This machine, as each run found it that measured any of the cells."""
        return list(dict.fromkeys(each.machine for each in self.outcomes if each.machine))

    @property
    def doubts(self) -> list[str]:
        """Why the numbers are not to be trusted; nothing where they are."""
        return doubts(self.outcomes)

    def tables(self) -> list[Shown]:
        """Return the tables."""
        return tables(self.outcomes)

    def notes(self) -> list[str]:
        """Return what has to be said beside the tables."""
        return [
            f"model: {self.model}; baseline: {self.against} ({self.baseline})",
            *(f"machine: {machine}" for machine in self.machines),
            f"numbers: {SPREAD}; ratios are of a round, ours and the other in turn",
            *(f"{_word(each)}: {each.cell}: {each.why_not}" for each in self._without),
            *(f"not to be trusted: {doubt}" for doubt in self.doubts),
            *([self._part] if self.interrupted else []),
        ]

    @property
    def _part(self) -> str:
        n_there = len(self.outcomes)
        return f"interrupted: {n_there} of {self.n_cells} cells; the same words with --resume go on"

    @property
    def _without(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.why_not]

    def markdown(self) -> str:
        """Return all of it as Markdown."""
        notes = "\n".join(f"- {note}" for note in self.notes())
        return "\n\n".join([*(table.markdown() for table in self.tables()), notes])

    def data(self) -> dict[str, Any]:
        """Return everything, for a script: every round of every cell."""
        return {
            "machines": [machine.model_dump() for machine in self.machines],
            "model": self.model,
            "engine": self.engine,
            "baseline": self.baseline,
            "trusted": bool(self.measured) and not self.doubts,
            "doubts": self.doubts,
            "interrupted": self.interrupted,
            "cells_wanted": self.n_cells,
            "cells_left": self.n_left,
            "took_s": round(self.took_s, 3),
            "cells": [each.model_dump(mode="json") for each in self.outcomes],
        }


def _word(outcome: Outcome) -> str:
    return "failed" if outcome.failed else "skipped"
