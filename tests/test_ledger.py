"""The ledger adds up, also after a crash in the middle of a line."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import ledger
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import AvoidedLine, Geometry, Ledger, LedgerLine, LoadLine, Totals

AT = datetime(2026, 1, 1, tzinfo=UTC)
LOAD = LoadLine(
    at=AT,
    generation=1,
    cause="up",
    by="me",
    loaded=True,
    load_s=0.5,
    model="/m.gguf",
    model_bytes=4,
    n_ctx=16384,
    n_seq=2,
)

if TYPE_CHECKING:
    from pathlib import Path
AVOIDED = AvoidedLine(
    at=AT,
    by="me",
    pause_ms=79.5,
    tokens_held=10106,
    previous=Geometry(n_ctx=16384, n_seq=2),
    geometry=Geometry(n_ctx=131072, n_seq=4),
)


def test_no_ledger_is_an_empty_one(tmp_path: Path) -> None:
    assert ledger.read(tmp_path / "ledger.jsonl") == Ledger(lines=(), totals=Totals())


def test_lines_add_up(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    failed = LOAD.model_copy(update={"loaded": False})
    for entry in (LOAD, AVOIDED, failed, AVOIDED, AVOIDED):
        ledger.append(path, entry)
    assert ledger.read(path).totals == Totals(weight_loads=1, loads_avoided=3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger.append(path, LOAD)
    with path.open("a") as torn:
        torn.write('{"v":1,"kind":"load","at":"20')
    ledger.append(path, AVOIDED)
    assert ledger.read(path).totals == Totals(weight_loads=1, loads_avoided=1)


def test_the_newest_lines_are_read_and_all_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    days: list[LedgerLine] = [
        LOAD.model_copy(update={"at": AT + timedelta(days=day)}) for day in range(4)
    ]
    for entry in (*days, AVOIDED.model_copy(update={"at": AT + timedelta(days=9)})):
        ledger.append(path, entry)
    totals = Totals(weight_loads=4, loads_avoided=1)
    found = ledger.read(path, limit=2)
    assert [line.at.day for line in found.lines] == [4, 10]
    assert isinstance(found.lines[1], AvoidedLine)
    assert found.totals == totals
    found = ledger.read(path, since=AT + timedelta(days=3))
    assert [line.at.day for line in found.lines] == [4, 10]
    assert ledger.read(path, limit=0) == Ledger(lines=(), totals=totals)


def test_a_ledger_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LlamactlError, match=r"the ledger .* cannot be read") as raised:
        ledger.read(tmp_path)
    assert raised.value.code == "state_unreadable"
