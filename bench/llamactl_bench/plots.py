"""Plots as SVG. They need matplotlib, which is optional."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from llamactl_supervisor.errors import InvalidRequestError

from llamactl_bench.asking import gaps_ms
from llamactl_bench.cell import Outcome, Side, Table
from llamactl_bench.spread import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIBRARY = "matplotlib"
NO_PLOTS = "plots_unavailable"
WIDTH, HEIGHT = 7.2, 4.2
"""Inches."""
OURS, CARRIED, READ_AGAIN, COPY = "#0072b2", "#e69f00", "#d55e00", "#999999"
"""Told apart by whoever sees fewer colours, too."""
SETTINGS: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "llamactl", "font.size": 9}
"""Text stays text, and the same numbers make the same file."""


def need() -> None:
    """Raise `plots_unavailable` where the library is missing: before anything is measured."""
    if find_spec(LIBRARY) is None:
        raise InvalidRequestError(
            NO_PLOTS,
            f"plots need {LIBRARY}, which is not installed; nothing was measured",
            hint=f"{shlex.quote(sys.executable)} -m pip install {LIBRARY}, or leave out --plots",
        )


def write(directory: Path, outcomes: Sequence[Outcome], against: str) -> list[Path]:
    """Write what there are numbers for; return the files. `against`: what the baseline is."""
    import matplotlib as mpl

    made: dict[str, Callable[[Sequence[Outcome]], Figure | None]] = {
        "pause-against-tokens": _against_tokens,
        "pause-against-context": _against_context,
        "neighbour": partial(_neighbour, against),
    }
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context(SETTINGS):
        for name, make in made.items():
            figure = make(outcomes)
            if figure is not None:
                path = directory / f"{name}.svg"
                figure.savefig(path, format="svg", metadata={"Date": None})
                written.append(path)
    return written


def _against_tokens(outcomes: Sequence[Outcome]) -> Figure | None:
    """Return how the pause grows with the tokens that are held."""
    found = _line(outcomes, Table.RECONFIGURE, "n_tokens", "n_seq", "n_ctx")
    if not found:
        return None
    figure, (axes,) = _figure(1)
    tokens = [each.cell.n_tokens for each in found]
    _plot(axes, tokens, [each.samples["pause_ms"] for each in found], "pause", OURS)
    twice = [[2 * ms for ms in each.samples["memcpy_ms"]] for each in found]
    _plot(axes, tokens, twice, "2 copies of the bytes that are held", COPY)
    axes.set(xlabel="tokens held, in all slots", ylabel="ms", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"Pause of a live change, {found[0].cell.n_ctx} x {found[0].cell.n_seq}")
    axes.legend()
    return figure


def _against_context(outcomes: Sequence[Outcome]) -> Figure | None:
    """Return the pause and what a relaunch takes, whatever the size of the context."""
    found = _line(outcomes, Table.RELAUNCH, "n_ctx", "n_seq", "n_tokens")
    if not found:
        return None
    figure, (axes,) = _figure(1)
    contexts = [each.cell.n_ctx for each in found]
    for name, label, colour in (
        ("read_again_s", "relaunch, prompts read again", READ_AGAIN),
        ("carry_s", "relaunch, slots saved to files and restored", CARRIED),
        ("pause_ms", "live change: pause", OURS),
    ):
        factor = 1e3 if name.endswith("_s") else 1.0
        values = [[factor * value for value in each.samples[name]] for each in found]
        _plot(axes, contexts, values, label, colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{n // 1024}k" for n in contexts])
    axes.set(xlabel="n_ctx", ylabel="ms")
    axes.set_title(f"A change of the context with {found[0].cell.n_tokens} tokens held")
    axes.legend()
    return figure


def _neighbour(against: str, outcomes: Sequence[Outcome]) -> Figure | None:
    """Return the gaps between a neighbour's tokens as they came, the operations marked."""
    found = [each for each in outcomes if each.timelines]
    if not found:
        return None
    largest = max(found, key=lambda each: each.cell.n_tokens)
    lines = largest.timelines
    figure, all_axes = _figure(len(lines))
    highest = 0.0
    for axes, line in zip(all_axes, lines, strict=True):
        seconds = [ms / 1e3 for ms in line.came_ms]
        gaps = gaps_ms(seconds, float("-inf"), float("inf"))
        highest = max(highest, *gaps)
        axes.vlines(seconds[1:], 0, gaps, color=OURS if line.side is Side.OURS else CARRIED)
        for mark in line.marks:
            axes.axvspan(mark.start_ms / 1e3, mark.end_ms / 1e3, color=COPY, alpha=0.35)
            axes.annotate(
                mark.name,
                (mark.start_ms / 1e3, 0.96),
                xycoords=("data", "axes fraction"),
                rotation=90,
                va="top",
                ha="right",
            )
        axes.set_ylabel("gap, ms")
        title = "llamactl's engine" if line.side is Side.OURS else f"slot files of {against}"
        axes.set_title(title, loc="left")
    longest = max(line.came_ms[-1] for line in lines) / 1e3
    for axes in all_axes:
        axes.set(xlim=(0, longest), ylim=(0, 1.15 * highest))
    all_axes[-1].set_xlabel("s")
    figure.suptitle(f"A neighbour's tokens while {largest.cell.n_tokens} others are moved")
    return figure


def _figure(n_rows: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, HEIGHT if n_rows == 1 else 0.7 * HEIGHT * n_rows), layout="tight")
    return figure, [figure.add_subplot(n_rows, 1, n + 1) for n in range(n_rows)]


def _plot(
    axes: Axes, places: Sequence[float], values: Sequence[Sequence[float]], label: str, colour: str
) -> None:
    """Draw medians, and a bar over the half of the rounds around each."""
    spreads = [spread(each) for each in values]
    medians = [each.median for each in spreads]
    below = [each.median - each.low for each in spreads]
    above = [each.high - each.median for each in spreads]
    axes.errorbar(
        places, medians, yerr=[below, above], label=label, color=colour, marker="o", capsize=3
    )


def _line(outcomes: Iterable[Outcome], table: Table, varied: str, *fixed: str) -> list[Outcome]:
    """Return the longest row of cells of a table that differ in one thing alone, in its order."""
    rows: dict[tuple[int, ...], list[Outcome]] = {}
    for each in outcomes:
        if each.cell.table is table and each.samples:
            key = tuple(getattr(each.cell, name) for name in fixed)
            rows.setdefault(key, []).append(each)
    longest = max(rows.values(), key=len, default=[])
    return sorted(longest, key=lambda each: int(getattr(each.cell, varied)))
