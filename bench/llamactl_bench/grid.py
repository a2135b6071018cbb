"""Which cells are measured, in which order, and about how long each takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_bench.cell import Cell, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TOKENS = (500, 1000, 2000, 4000, 8000)
SLOTS = (1, 2, 4, 8, 16)
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
FEW = 1000
"""Tokens held where something else is varied: they fit into the smallest context."""
WIDE = 32768
"""Cells of the context where something else is varied."""
ROUNDS, ROUNDS_QUICK = 5, 3
SPEED_PROMPT, SPEED_ANSWER = 512, 64
SPEED_ROUNDS = 2
"""So many times the rounds: a difference of a percent wants more of them."""
NEIGHBOUR_TOKENS = 8192
"""Room for what a neighbour writes while it is watched."""
STEP = 1024
"""A context is a multiple of this for each slot."""
SPARE = 256
"""Cells of a slot that a conversation does not fill."""

FLOP_PER_BYTE = 3.5
"""Of a token's prefill, for each byte of quantized weights."""
FLOPS_PER_CORE = 25e9
WEIGHT_BYTES_PER_S = 5e9
LOAD_BYTES_PER_S = 1e9
START_S = 0.5
"""Of an engine, beside the load of its weights."""
CHANGE_S = 0.15
OPERATIONS_S = 8.0
"""Of one round of all that is done beside a neighbour, on both engines."""


@dataclass(frozen=True)
class Speed:
    """About how fast a machine is with a model; the first cells correct it."""

    load_s: float
    prefill_s: float
    """Of one token."""
    decode_s: float

    @classmethod
    def of(cls, weight_bytes: int, cores: int) -> Speed:
        """Guess it from the size of the weights, for a processor."""
        return cls(
            load_s=START_S + weight_bytes / LOAD_BYTES_PER_S,
            prefill_s=weight_bytes * FLOP_PER_BYTE / (FLOPS_PER_CORE * cores),
            decode_s=weight_bytes / WEIGHT_BYTES_PER_S,
        )


def cells(*, quick: bool, speed: bool, tables: Iterable[Table] = ()) -> list[Cell]:
    """Return what is measured, what says most first: a budget cuts at the end.

    `speed`: there is another engine to compare ours with.
    """
    rounds = ROUNDS_QUICK if quick else ROUNDS
    tokens = (TOKENS[0], TOKENS[2]) if quick else TOKENS
    slots = (SLOTS[0], SLOTS[2]) if quick else SLOTS
    contexts = (CONTEXTS[0], CONTEXTS[3]) if quick else CONTEXTS
    few = TOKENS[0] if quick else FEW

    def cell(table: Table, n_tokens: int, n_seq: int, n_ctx: int, times: int = 1) -> Cell:
        return Cell(table=table, n_tokens=n_tokens, n_seq=n_seq, n_ctx=n_ctx, rounds=rounds * times)

    wanted = set(tables) or set(Table)
    found = [
        [cell(Table.RECONFIGURE, n, 2, WIDE) for n in tokens],
        [cell(Table.RELAUNCH, few, 2, n) for n in contexts],
        [cell(Table.PAGES, n, 2, paged_context(n)) for n in tokens[::2]],
        [cell(Table.RECONFIGURE, few, n, WIDE) for n in slots],
        [cell(Table.SPEED, SPEED_PROMPT, 1, SPEED_PROMPT * 4, SPEED_ROUNDS)] if speed else [],
        [] if quick else [cell(Table.RELAUNCH, tokens[-1], 2, contexts[-1])],
    ]
    ordered = [each for line in _outside_in(found) for each in line]
    return [each for each in dict.fromkeys(ordered) if each.table in wanted]


def _outside_in(lines: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    """Return the ends of all lines, and then what is between: few cells show the whole range."""
    ends = [[line[-1], *line[:-1][:1]] for line in lines if line]
    return [*ends, *([*line[1:-1]] for line in lines)]


def paged_context(n_tokens: int) -> int:
    """Return the context for a conversation and a neighbour; slots are of one size."""
    return 2 * _multiple(n_tokens + NEIGHBOUR_TOKENS)


def away(cell: Cell) -> tuple[int, int]:
    """Return tokens and slots of the geometry that a change comes from: one slot more, no more
    room than what is held needs."""
    n_seq = cell.n_seq + 1
    return n_seq * _multiple(cell.per_slot + SPARE), n_seq


def grown(cell: Cell) -> tuple[int, int]:
    """Return a geometry with one slot more, of the same size each: nothing is parked."""
    n_seq = cell.n_seq + 1
    return cell.n_ctx // cell.n_seq * n_seq, n_seq


def largest(cell: Cell) -> tuple[int, int]:
    """Return tokens and slots of the largest geometry that a cell asks for."""
    return grown(cell) if cell.table is Table.PAGES else (cell.n_ctx, cell.n_seq + 1)


def _multiple(n_tokens: int) -> int:
    return -(-n_tokens // STEP) * STEP


def estimate_s(cell: Cell, speed: Speed) -> float:
    """Return about how many seconds a cell takes."""
    fill_s = cell.n_tokens * speed.prefill_s
    change_s = 2 * CHANGE_S * cell.rounds
    if cell.table is Table.RECONFIGURE:
        return speed.load_s + fill_s + change_s
    if cell.table is Table.RELAUNCH:
        starts = 2 + 2 * cell.rounds
        return starts * speed.load_s + (2 + cell.rounds) * fill_s + change_s
    if cell.table is Table.PAGES:
        return 2 * (speed.load_s + fill_s) + cell.rounds * OPERATIONS_S
    answer_s = SPEED_ANSWER * speed.decode_s
    return 2 * (speed.load_s + cell.rounds * (fill_s + answer_s))


class Budget:
    """How much time is left, and whether a cell fits into it, by what those before it took."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._estimated_s = self._took_s = 0.0

    @property
    def factor(self) -> float:
        """How much longer than estimated cells take here."""
        return self._took_s / self._estimated_s if self._estimated_s else 1.0

    def fits(self, estimated_s: float) -> bool:
        """Whether there is time for it."""
        return estimated_s * self.factor <= self._left_s

    def spend(self, estimated_s: float, took_s: float) -> None:
        """Note how long a cell took."""
        self._left_s -= took_s
        self._estimated_s += estimated_s
        self._took_s += took_s
