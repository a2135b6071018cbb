"""The ledger adds up, also after a crash in the middle of a line."""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from llamactl_supervisor import ledger
from llamactl_supervisor.models import Geometry

AT = datetime(2026, 1, 1, tzinfo=UTC)
LOAD = ledger.LoadLine(
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
AVOIDED = ledger.AvoidedLine(
    at=AT,
    by="me",
    pause_ms=79.5,
    tokens_held=10106,
    previous=Geometry(n_ctx=16384, n_seq=2),
    geometry=Geometry(n_ctx=131072, n_seq=4),
)


def test_no_ledger_is_an_empty_one(tmp_path: Path) -> None:
    assert ledger.totals(tmp_path / "ledger.jsonl") == ledger.Totals()


def test_lines_add_up(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    failed = LOAD.model_copy(update={"loaded": False})
    for entry in (LOAD, AVOIDED, failed, AVOIDED, AVOIDED):
        ledger.append(path, entry)
    assert ledger.totals(path) == ledger.Totals(weight_loads=1, loads_avoided=3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger.append(path, LOAD)
    with path.open("a") as torn:
        torn.write('{"v":1,"kind":"load","at":"20')
    ledger.append(path, AVOIDED)
    assert ledger.totals(path) == ledger.Totals(weight_loads=1, loads_avoided=1)
