"""`llamactl ledger`: the same lines and sums with a daemon and without."""

from __future__ import annotations

import os
import signal
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from cli_home import Home, fresh_home
from llamactl_supervisor import ledger
from llamactl_supervisor.models import AvoidedLine, Geometry, LoadLine
from llamactl_supervisor.transport import ANSWER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS = 80


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


def test_the_ledger_reads_the_same_with_and_without_a_daemon(home: Home) -> None:
    home.up()
    home.run("reconfigure", "-c", "128k", "-np", "4")
    ran = home.run("ledger")
    header, load, avoided = ran.out.splitlines()[:3]
    assert header.split() == ["when", "what", "by", "took", "of"]
    assert "load: up" in load
    assert load.endswith("24 B, 16k x 2")
    assert "avoided" in avoided
    assert avoided.endswith("79.5 ms  16k x 2 > 128k x 4")
    assert all(len(line) <= COLUMNS for line in ran.out.splitlines())
    seen = home.run("ledger", "--json").result
    assert (seen["sums"]["loads"], seen["sums"]["loads_avoided"]) == (1, 1)
    assert seen["sums"]["pause_s"] == 0.0795
    assert [line["kind"] for line in home.run("ledger", "-n", "1", "--json").result["lines"]] == [
        "avoided"
    ]
    assert home.run("ledger", "--since", "0s").out == "no lines\n"
    home.run("down")
    after = home.run("ledger").out.splitlines()
    carried = after.pop(3)
    assert "carried out" in carried
    assert carried.endswith("82.0 KiB, 2 kept in files")
    assert len(carried) <= COLUMNS
    assert [line.split() for line in after] == [line.split() for line in ran.out.splitlines()]


def test_the_ledger_waits_for_no_daemon_that_is_stopped(home: Home) -> None:
    home.up()
    pid = home.run("status", "--json").result["daemon"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    ran = home.run("ledger")
    took_s = time.monotonic() - began
    os.kill(pid, signal.SIGCONT)
    assert "load: up" in ran.out
    assert took_s < ANSWER_S, "less than is waited for an answer elsewhere"


def test_what_was_saved_is_an_estimate_from_the_median_load(home: Home) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    shape: dict[str, Any] = {"n_ctx": 16384, "n_seq": 2}
    load: dict[str, Any] = {"at": at, "generation": 1, "cause": "up", "by": "me", "model": "/m"}
    load |= {"model_bytes": None} | shape
    home.paths.state.mkdir()
    for load_s, loaded in ((1.0, True), (2.0, True), (30.0, True), (60.0, False)):
        line = LoadLine(load_s=load_s, loaded=loaded, **load)
        ledger.append(home.paths.ledger_file, line)
    both = Geometry(**shape)
    change: dict[str, Any] = {"at": at, "by": "me", "tokens_held": 0}
    for _ in range(3):
        avoided = AvoidedLine(pause_ms=500.0, previous=both, geometry=both, **change)
        ledger.append(home.paths.ledger_file, avoided)
    assert home.run("ledger", "--json").result["sums"] == {
        "loads": 3,
        "loads_failed": 1,
        "loads_aborted": 0,
        "loads_timed": 3,
        "load_s": 33.0,
        "loads_avoided": 3,
        "pause_s": 1.5,
        "saved_s": 4.5,
    }
    rows = home.run("ledger").rows
    assert rows["loads"] == "3, 33 s in all, 1 failed"
    assert rows["saved"].startswith("about 4.5 s (estimate")
    rows = home.run("ledger", "-n", "5").rows
    assert rows["loads"] == "1, 30 s in the 5 lines shown, 1 failed"
    assert rows["avoided"] == "3, 1500.0 ms paused in the 5 lines shown"


@pytest.mark.parametrize(
    ("loads_s", "load_s", "said"),
    [
        ((None, None), None, "2 (2 not timed) in all"),
        ((1.5, None), 1.5, "2, 1.5 s (1 not timed) in all"),
        ((), None, "0 in all, 1 failed"),
    ],
)
def test_loads_that_nobody_timed_are_in_no_sum(
    home: Home, loads_s: tuple[float | None, ...], load_s: float | None, said: str
) -> None:
    load: dict[str, Any] = {"at": datetime(2026, 1, 1, tzinfo=UTC), "generation": 2, "by": "me"}
    load |= {"cause": "wake", "model": "/m", "model_bytes": None, "n_ctx": 16384, "n_seq": 2}
    home.paths.state.mkdir()
    for took_s in loads_s:
        ledger.append(home.paths.ledger_file, LoadLine(load_s=took_s, loaded=True, **load))
    if not loads_s:
        ledger.append(home.paths.ledger_file, LoadLine(load_s=3.0, loaded=False, **load))
    assert home.run("ledger", "--json").result["sums"]["load_s"] == load_s
    assert home.run("ledger").rows["loads"] == said


def test_why_an_engine_took_the_place_of_another_is_shown(home: Home) -> None:
    load: dict[str, Any] = {"at": datetime(2026, 1, 1, tzinfo=UTC), "generation": 2, "by": "me"}
    load |= {"cause": "run", "model": "/m", "model_bytes": None, "n_ctx": 16384, "n_seq": 2}
    home.paths.state.mkdir()
    line = LoadLine(load_s=1.0, loaded=True, reasons=("cwd", "--threads"), **load)
    ledger.append(home.paths.ledger_file, line)
    assert home.run("ledger").out.splitlines()[1].endswith("16k x 2, for cwd, --threads")
