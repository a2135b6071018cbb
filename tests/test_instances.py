"""The records of holders, and the fence before those that come too late."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from llamactl_supervisor import instances
from llamactl_supervisor.config import Paths
from machine import REQUEST

if TYPE_CHECKING:
    from pathlib import Path

RECORD = {"instance_id": "abc", "boot_id": "b", "holder_pid": 2, "holder_start_ticks": 20}
ASKED = instances.Asked(generation=1, request=REQUEST, override=None)
ENGINE = {"engine_pid": 1, "engine_start_ticks": 10}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = Paths(tmp_path / "c", tmp_path / "s", tmp_path / "r")
    found.create()
    instances.create(found, "abc", ASKED)
    return found


def put(paths: Paths, name: str, record: dict[str, Any]) -> None:
    (paths.engine_dir("abc") / name).write_text(json.dumps(record))


def test_a_record_names_engine_and_holder(paths: Paths) -> None:
    put(paths, "holder.json", RECORD | ENGINE | {"from_tomorrow": 1})
    found = instances.read(paths, "abc")
    assert found is not None
    assert (found.engine.pid, found.engine.start_ticks, found.engine.boot_id) == (1, 10, "b")
    assert found.holder is not None
    assert found.holder.pid == 2
    assert list(instances.names(paths)) == ["abc"]


@pytest.mark.parametrize("record", [None, RECORD | {"engine_pid": None}, {"half": 1}])
def test_a_directory_without_an_engine_is_fenced(
    paths: Paths, record: dict[str, Any] | None
) -> None:
    if record is not None:
        put(paths, "holder.json", record)
    assert instances.fence(paths, "abc") is None
    assert list(paths.runtime.iterdir()) == []


def test_an_engine_released_before_the_fence_stays(paths: Paths) -> None:
    put(paths, "holder.json", RECORD | ENGINE)
    assert instances.fence(paths, "abc") == instances.read(paths, "abc") is not None


def test_without_a_record_the_status_is_lost_and_says_so(paths: Paths) -> None:
    record = instances.exit_record(paths, "abc")
    assert (record.exit_code, record.signal) == (None, None)
    assert "unknown status" in record.summary


@pytest.mark.parametrize(
    ("how", "summary"),
    [
        ({"exec_errno": 2, "exit_code": 127}, "could not be run: No such file or directory"),
        ({"signal": 9}, "was ended by signal 9 (SIGKILL)"),
        ({"exit_code": 1}, "exited with status 1"),
        ({"signal": 40}, "was ended by signal 40"),
    ],
)
def test_an_exit_is_told_in_words(paths: Paths, how: dict[str, int], summary: str) -> None:
    record: dict[str, Any] = {"exec_errno": None, "exit_code": None, "signal": None} | how
    record |= {"ended_at": "2026-01-01T00:00:00+00:00", "cpu_s": 1.5, "max_rss_bytes": 1}
    put(paths, "exit.json", record | {"last_lines": ["oops"], "dropped_bytes": 0})
    found = instances.exit_record(paths, "abc")
    assert (found.summary, found.last_lines) == (summary, ("oops",))


def test_a_pulse_that_is_not_there_does_not_move(paths: Paths) -> None:
    assert instances.pulse(paths, "abc") == 0
    put(paths, "pulse", {})
    assert instances.pulse(paths, "abc") > 0


def test_what_an_engine_was_asked_to_be_is_known_without_the_state(paths: Paths) -> None:
    assert instances.asked(paths, "abc") == ASKED
    assert (paths.engine_dir("abc") / "asked.json").stat().st_mode & 0o777 == 0o600
    put(paths, "asked.json", {"generation": 1})
    assert instances.asked(paths, "abc") is None
    assert instances.asked(paths, "other") is None
