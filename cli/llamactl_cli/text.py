"""Numbers, times and tables as a person reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from llamactl_supervisor.models import Geometry, LoadLine

COLUMN_GAP = "  "
SCREEN_COLUMNS = 80
PATH_COLUMNS = 66
"""What a screen has left for a path beside its name."""
PHASE_MS_MIN = 0.05


def table(rows: Iterable[tuple[str, str | None]]) -> str:
    """Return one line per row, values aligned; a row without a value is left out."""
    shown = [(name, value) for name, value in rows if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join(f"{name:<{width}}{COLUMN_GAP}{value}" for name, value in shown)


def screen(rows: Iterable[tuple[str, str | None]]) -> str:
    """Return the table in 80 columns: a longer value goes on below. A word is never broken."""
    from textwrap import wrap

    shown = [(name, value) for name, value in rows if value is not None]
    width = SCREEN_COLUMNS - max((len(name) for name, _ in shown), default=0) - len(COLUMN_GAP)
    lines: list[tuple[str, str | None]] = []
    for name, value in shown:
        parts = wrap(value, width, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [(name, parts[0]), *(("", part) for part in parts[1:])]
    return table(lines)


def middle(text: str, width: int) -> str:
    """Return the text in `width` columns: of a longer one, both ends around an ellipsis."""
    if len(text) <= width:
        return text
    tail = (width - 3) * 2 // 3
    return f"{text[: width - 3 - tail]}...{text[-tail:]}"


def bar(part: int, whole: int, cells: int) -> str:
    """Return `cells` characters, filled as far as `part` fills `whole`; anything shows as one."""
    full = min(cells, cells * part // whole) if whole > 0 else 0
    return ("#" * max(full, min(part, 1))).ljust(cells, ".")


def shown(text: str) -> str:
    """Return the text with what would steer a terminal written out; it keeps lines and tabs."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def printable(text: str) -> str:
    """Return the text with what would steer a terminal or break a line written out instead."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def value(setting: object) -> str:
    """Return a value of the configuration as TOML writes it; `-` where there is none."""
    return "-" if setting is None else json.dumps(setting, ensure_ascii=False)


def written(setting: object) -> str:
    """Return a value as a sentence says it: as TOML writes it, or `absent`."""
    return "absent" if setting is None else value(setting)


def columns(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a line of names and one line per row, each column as wide as its widest cell."""
    lines = [names, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(COLUMN_GAP.join(map(str.ljust, line, widths)).rstrip() for line in lines)


def count(number: int, noun: str) -> str:
    """Return `1 slot`, `2 slots`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def lost(lines: int) -> str:
    """Return how many lines the ledger lacks; earlier daemons did not leave word of theirs."""
    return f"{count(lines, 'line')} since the daemon began"


def times(number: int) -> str:
    """Return `once`, `2 times`."""
    return "once" if number == 1 else f"{number} times"


def size(n_bytes: int) -> str:
    """Return a number of bytes in the largest binary unit that leaves one digit before the dot."""
    value, units = float(n_bytes), ("KiB", "MiB", "GiB")
    unit = "B"
    for larger in units:
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{n_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def need(what: str, n_bytes: int, there: int | None) -> str:
    """Return what is needed, and what there is of it where that is known."""
    return f"{size(n_bytes)} of {what}" + ("" if there is None else f" ({size(there)} there)")


def local(at: datetime) -> str:
    """Return the moment in local time."""
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S}"


def seconds(value_s: float) -> str:
    """Return a time span with the two largest units that matter."""
    if value_s < 59.5:
        return f"{value_s:.1f} s" if value_s < 10 else f"{value_s:.0f} s"
    minutes, rest_s = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def phases(phases_ms: Mapping[str, float]) -> str:
    """Return the phases, the longest first; what rounds to nothing is left out."""
    felt = [item for item in phases_ms.items() if item[1] >= PHASE_MS_MIN]
    ordered = sorted(felt, key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {spent_ms:.1f}" for name, spent_ms in ordered)


def geometry(effective: Geometry) -> str:
    """Return total, slots and what one of them holds, e.g. `16384 tokens: 2 slots of 8192`."""
    slots = count(effective.n_seq, "slot")
    if effective.kv_unified:
        return f"{effective.n_ctx} tokens shared by {slots}"
    each = effective.n_ctx_seq or effective.n_ctx // effective.n_seq
    return f"{effective.n_ctx} tokens: {slots} of {each}"


def shape(asked: Geometry | LoadLine) -> str:
    """Return total and slots in short, e.g. `16k x 2`; a total that is no multiple is written out.

    It is how both can be given to `reconfigure`.
    """
    if not isinstance(asked.n_ctx, int):
        return f"{asked.n_ctx} x {asked.n_seq}"
    thousands, rest = divmod(asked.n_ctx, 1024)
    return f"{asked.n_ctx if rest else f'{thousands}k'} x {asked.n_seq}"


def usable(effective: Geometry) -> str | None:
    """Return what a request can use where that is less than its slot has; None elsewhere."""
    whole = effective.n_ctx if effective.kv_unified else effective.n_ctx_seq
    if whole is None or effective.n_ctx_slot is None or effective.n_ctx_slot >= whole:
        return None
    return f"{effective.n_ctx_slot} of the {whole} in a slot (training context or a cap)"
