"""What was found, as tables: medians with the half of the rounds around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_bench.cell import Outcome, Side, Table
from llamactl_bench.spread import Spread, number, ratio, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MB = 1e6
PAGE_STEPS = {
    "page_out_ms": "page_out, on the engine's thread",
    "page_in_ms": "page_in, on the engine's thread",
    "save_ms": "save of the baseline, on its thread",
    "restore_ms": "restore of the baseline, on its thread",
    "memcpy_ms": "memcpy of the page's bytes",
    "spill_ms": "spill, beside decoding",
    "spill_alone_ms": "spill, nobody decoding",
    "write_ms": "write and fsync of as many bytes",
    "gap_ms": "neighbour's median gap in quiet time",
    "quiet_ms": "neighbour's worst gap in quiet time",
    "beside_page_out_ms": "neighbour's worst gap beside page_out",
    "beside_page_in_ms": "neighbour's worst gap beside page_in",
    "beside_spill_ms": "neighbour's worst gap beside spill",
    "beside_grow_ms": "neighbour's worst gap beside a larger context",
    "beside_shrink_ms": "neighbour's worst gap beside a smaller context",
    "beside_save_ms": "neighbour's worst gap beside save of the baseline",
}
PAGE_RATIOS = (
    ("page_out ÷ memcpy", "page_out_ms", "memcpy_ms"),
    ("page_in ÷ memcpy", "page_in_ms", "memcpy_ms"),
    ("save of the baseline ÷ page_out", "save_ms", "page_out_ms"),
    ("worst gap beside page_out ÷ beside save", "beside_page_out_ms", "beside_save_ms"),
    ("worst gap beside spill ÷ median gap", "beside_spill_ms", "gap_ms"),
    ("spill ÷ write and fsync, throughput", "write_ms", "spill_alone_ms"),
)


@dataclass(frozen=True)
class Shown:
    """A table as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        return f"### {self.title}\n\n{table}"


def tables(outcomes: Iterable[Outcome]) -> list[Shown]:
    """Return a table for each that has cells with numbers."""
    by_table: dict[Table, list[Outcome]] = {table: [] for table in Table}
    for outcome in outcomes:
        if outcome.samples:
            by_table[outcome.cell.table].append(outcome)
    return [_SHOWN[table](sorted(found, key=_size)) for table, found in by_table.items() if found]


def _size(outcome: Outcome) -> tuple[int, int, int]:
    cell = outcome.cell
    return cell.n_ctx, cell.n_seq, cell.n_tokens


def _of(outcome: Outcome, name: str) -> Spread:
    return spread(outcome.samples[name])


def _by(outcome: Outcome, ours: str, theirs: str, factor: float = 1.0) -> str:
    return str(ratio(outcome.samples[ours], [factor * n for n in outcome.samples[theirs]]))


def _where(outcome: Outcome) -> tuple[str, str, str]:
    cell = outcome.cell
    return str(cell.n_tokens), str(cell.n_seq), str(cell.n_ctx)


def _reconfigure(outcomes: Sequence[Outcome]) -> Shown:
    columns = ("held tokens", "slots", "n_ctx", "MB held", "pause ms", "memcpy ms")
    more = ("pause ÷ (2 × memcpy)", "build beside ms", "resident after ÷ before")  # noqa: RUF001
    rows = [
        (
            *_where(each),
            number(each.facts["bytes_held"] / MB),
            str(_of(each, "pause_ms")),
            str(_of(each, "memcpy_ms")),
            _by(each, "pause_ms", "memcpy_ms", 2),
            str(_of(each, "build_ms")),
            f"{each.facts['resident_ratio']:.3f}",
        )
        for each in outcomes
    ]
    return Shown("A live change of the context", (*columns, *more), tuple(rows))


def _relaunch(outcomes: Sequence[Outcome]) -> Shown:
    columns = ("held tokens", "slots", "n_ctx", "pause ms", "change s", "relaunch, slot files s")
    more = ("relaunch, prompts again s", "slot files ÷ pause", "prompts again ÷ pause")
    rows = [
        (
            *_where(each),
            str(_of(each, "pause_ms")),
            str(_of(each, "change_s")),
            str(_of(each, "carry_s")),
            str(_of(each, "read_again_s")),
            _by(each, "carry_s", "pause_ms", 1e-3),
            _by(each, "read_again_s", "pause_ms", 1e-3),
        )
        for each in outcomes
    ]
    return Shown("A live change beside a relaunch", (*columns, *more), tuple(rows))


def _pages(outcomes: Sequence[Outcome]) -> Shown:
    columns = (f"{each.cell.n_tokens} tokens" for each in outcomes)
    held = (number(each.facts["bytes_held"] / MB) for each in outcomes)
    rows = [("MB of the page", *held)]
    rows += [
        (f"{title}, ms", *(str(_of(each, name)) for each in outcomes))
        for name, title in PAGE_STEPS.items()
    ]
    rows += [
        (title, *(_by(each, ours, theirs) for each in outcomes))
        for title, ours, theirs in PAGE_RATIOS
    ]
    return Shown("A conversation out of its slot and back", ("", *columns), tuple(rows))


def _speed(outcomes: Sequence[Outcome]) -> Shown:
    columns = ("", "ours, tokens/s", "baseline, tokens/s", "ours ÷ baseline")
    rows = []
    for each in outcomes:
        for what in ("prefill", "decode"):
            ours, theirs = (f"{side}_{what}_per_s" for side in Side)
            by = ratio(each.samples[ours], each.samples[theirs])
            three = f"{by.median:.3f} ({by.low:.3f}..{by.high:.3f})"
            rows.append((what, str(_of(each, ours)), str(_of(each, theirs)), three))
    return Shown("Speed with the patches and without", columns, tuple(rows))


_SHOWN: dict[Table, Callable[[Sequence[Outcome]], Shown]] = {
    Table.RECONFIGURE: _reconfigure,
    Table.RELAUNCH: _relaunch,
    Table.PAGES: _pages,
    Table.SPEED: _speed,
}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
