"""Numbers, times and tables as a person reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llamactl_supervisor.models import Geometry

COLUMN_GAP = "  "
PHASE_MS_MIN = 0.05


def table(rows: Iterable[tuple[str, str | None]]) -> str:
    """Return one line per row, values aligned; a row without a value is left out."""
    shown = [(name, value) for name, value in rows if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join(f"{name:<{width}}{COLUMN_GAP}{value}" for name, value in shown)


def printable(text: str) -> str:
    """Return the text with what would steer a terminal or break a line written out instead."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def value(setting: object) -> str:
    """Return a value of the configuration as TOML writes it; `-` where there is none."""
    return "-" if setting is None else json.dumps(setting, ensure_ascii=False)


def columns(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a line of names and one line per row, each column as wide as its widest cell."""
    lines = [names, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(COLUMN_GAP.join(map(str.ljust, line, widths)).rstrip() for line in lines)


def count(number: int, noun: str) -> str:
    """Return `1 slot`, `2 slots`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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


def usable(effective: Geometry) -> str | None:
    """Return what a request can use where that is less than its slot has; None elsewhere."""
    whole = effective.n_ctx if effective.kv_unified else effective.n_ctx_seq
    if whole is None or effective.n_ctx_slot is None or effective.n_ctx_slot >= whole:
        return None
    return f"{effective.n_ctx_slot} of the {whole} in a slot (training context or a cap)"
