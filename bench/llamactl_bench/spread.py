"""A number that differs from round to round: its median, and the half of the rounds around it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Spread:
    """Median, first and third quartile: half of the rounds lie between those."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if self.n == 1:
            return number(self.median)
        return f"{number(self.median)} ({number(self.low)}..{number(self.high)})"


def spread(values: Sequence[float]) -> Spread:
    """Return it; there must be one value at least."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return ours by theirs, round by round: what disturbed a round disturbed both."""
    return spread([one / other for one, other in zip(ours, theirs, strict=True)])


def number(value: float) -> str:
    """Return three digits that count."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
