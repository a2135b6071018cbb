"""Crash records: what is kept of an end that nobody asked for, and what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import crashes
from llamactl_supervisor import events as ev
from llamactl_supervisor.models import ExitRecord, Override, Problem
from machine import AT, FACTS, RECORD
from machine import process as engine

if TYPE_CHECKING:
    from pathlib import Path

OVERRIDE = Override(n_ctx=131072, n_seq=4, kv_unified=None, by="me", at=AT)
PROBLEM = Problem(
    code="engine_wedged", message="it hangs", details={"still_s": 30.0, "last_lines": ["oops"]}
)
EFFECT = ev.RecordCrash(
    generation=7,
    process=engine(7),
    cause=ev.LoadCause.UP,
    facts=FACTS,
    override=OVERRIDE,
    problem=PROBLEM,
    record=RECORD,
    api_key_file=None,
)


def said(*lines: str, secrets: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the last lines as they are kept."""
    record = RECORD.model_copy(update={"last_lines": lines})
    return crashes.of(replace(EFFECT, record=record), 1.0, secrets).exit.last_lines


def test_a_record_tells_what_a_person_will_ask(tmp_path: Path) -> None:
    path = crashes.write(tmp_path, crashes.of(EFFECT, 42.04, ()))
    assert path.name == "20260101T000000.000000Z-7.json"
    assert path.stat().st_mode & 0o777 == 0o600
    kept = json.loads(path.read_text())
    assert (kept["generation"], kept["pid"], kept["cause"]) == (7, 1007, "up")
    assert (kept["code"], kept["message"]) == ("engine_wedged", "it hangs")
    assert kept["uptime_s"] == 42.0
    assert kept["evidence"] == {"still_s": 30.0}
    assert kept["geometry"]["n_ctx"] == 16384
    assert kept["override"]["n_ctx"] == 131072
    assert (kept["exit"]["exit_code"], kept["exit"]["last_lines"]) == (1, ["oops"])
    assert crashes.newest(tmp_path) == path


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    paths = []
    for number in range(crashes.KEPT + 3):
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(milliseconds=number)
        record = ExitRecord(summary="exited", at=at)
        paths.append(crashes.write(tmp_path, crashes.of(replace(EFFECT, record=record), 1.0, ())))
    assert sorted(tmp_path.iterdir()) == paths[3:]
    assert crashes.newest(tmp_path) == paths[-1]


def test_nothing_is_kept_before_the_first(tmp_path: Path) -> None:
    assert crashes.newest(tmp_path) is None
    assert crashes.newest(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("Authorization: Bearer hunter2-secret", "Authorization: Bearer ***"),
        (
            '{"Authorization": "Bearer hunter2-secret", "a": 1}',
            '{"Authorization": "Bearer ***", "a": 1}',
        ),
        (
            "argv: llama-server --api-key hunter2-secret -c 1",
            "argv: llama-server --api-key *** -c 1",
        ),
        ("--api-key=hunter2-secret", "--api-key=***"),
        ('"api_key": "hunter2-secret"', '"api_key": "***"'),
        ("-hft hunter2-secret", "-hft ***"),
        ("--hf-token hunter2-secret", "--hf-token ***"),
        ("main: loading hunter2-secret from the file", "main: loading *** from the file"),
        ("main: 7 tokens in 3 ms", "main: 7 tokens in 3 ms"),
    ],
)
def test_no_secret_is_kept(line: str, kept: str) -> None:
    assert said(line, secrets=("hunter2-secret", "")) == (kept,)
    if "main:" not in line:
        assert said(line) == (kept,), "known by how it is written, not by what it is"
