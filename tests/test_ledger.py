"""The ledger adds up, also after a crash in the middle of a line."""

from __future__ import annotations

import os
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
    assert ledger.read(path).unreadable == 1
    with path.open("ab") as damaged:
        damaged.write(b'\xff\x00\n{"v":9}\n\n')
    found = ledger.read(path, limit=0)
    assert (found.unreadable, found.totals.weight_loads) == (3, 1)


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


def test_wherever_a_line_is_torn_the_others_stay(tmp_path: Path) -> None:
    """A crash at each byte of the last line; the next append is whole, and is the newest."""
    path = tmp_path / "ledger.jsonl"
    ledger.append(path, LOAD)
    before = path.read_bytes()
    ledger.append(path, AVOIDED)
    whole = path.read_bytes()
    for size in range(len(before), len(whole)):
        path.write_bytes(whole[:size])
        ledger.append(path, AVOIDED)
        torn = size - len(before)
        kept = 2 if torn == len(whole) - len(before) - 1 else 1  # only its line end was missing
        assert ledger.read(path).totals == Totals(weight_loads=1, loads_avoided=kept), torn
        assert ledger.recent(path, 1) == [AVOIDED]


def test_a_line_that_the_disk_takes_in_part_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller counts it as lost; the rest of it costs itself only."""
    path = tmp_path / "ledger.jsonl"
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
        with pytest.raises(OSError, match="No space left"):
            ledger.append(path, LOAD)
    ledger.append(path, LOAD)
    assert ledger.read(path).lines == (LOAD,)


def test_the_recent_lines_are_the_last_of_a_long_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    assert ledger.recent(path, 3) == []
    loads = [LOAD.model_copy(update={"generation": number}) for number in range(9)]
    for entry in loads:
        ledger.append(path, entry)
    assert ledger.recent(path, 3) == loads[-3:]
    size = len(path.read_bytes()) // 9
    monkeypatch.setattr(ledger, "RECENT_BYTES", size * 2 + 5)  # begins in the middle of a line
    assert ledger.recent(path, 9) == loads[-2:]
