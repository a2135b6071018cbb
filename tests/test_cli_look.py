"""What `status`, `slots` and `pages` show of an engine: busy, asleep, mute."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest
from cli_home import Home, fresh_home
from llamactl_cli.holdings import SLOTS_MAX
from llamactl_cli.views import SLEPT
from llamactl_supervisor import procfs
from sandbox import until

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS = 80


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


def ends_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `down` not wait for what an engine holds that says nothing."""
    monkeypatch.setenv("LLAMACTL_CARRY_ON_STOP", "false")


def test_status_shows_slots_with_a_bar_pages_and_memory(home: Home) -> None:
    home.up("--fake-parked")
    ran = home.run("status")
    assert (ran.code, ran.err) == (0, "")
    assert ran.rows["slot 0"] == "[#...................]  40 of 8192 tokens"
    assert ran.rows["parked"] == "7 tokens as parked-1, slot 1, its request waits"
    assert ran.rows["pages"] == "1 page, 7.0 KiB, 1 parked"
    assert all(len(line) <= COLUMNS for line in ran.out.splitlines())
    seen = home.run("status", "--json").result
    assert [slot["n_prompt_tokens"] for slot in seen["holds"]["slots"]] == [40, 41, 7]
    memory = seen["memory"]
    parts = ("weights_bytes", "files_bytes", "pages_bytes", "contexts_bytes")
    assert sum(memory[part] for part in parts) == memory["resident_bytes"]
    assert memory["pages_bytes"] == 7 * 1024
    real = psutil.Process(seen["engine"]["pid"]).memory_info().rss
    assert memory["resident_bytes"] == pytest.approx(real, rel=0.1)


def test_status_names_the_last_pauses_the_newest_first(home: Home) -> None:
    home.up()
    for n_ctx in ("32k", "48k", "64k", "128k"):
        home.run("reconfigure", "-c", n_ctx)
    lines = home.run("status").out.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("last pause"))
    assert [line[10:].split(", ")[1] for line in lines[first : first + 3]] == [
        *("64k x 2 -> 128k x 2", "48k x 2 -> 64k x 2", "32k x 2 -> 48k x 2"),
    ]
    assert len(home.run("status", "--json").result["pauses"]) == 3


def test_status_lets_an_engine_sleep(home: Home) -> None:
    """The fake one dies of the question for its slots."""
    pid = home.up("--fake-asleep")["pid"]
    ran = home.run("status")
    asleep = "asleep: they hold nothing now, pages stay; `llamactl slots` wakes it"
    assert (ran.code, ran.rows["slots"]) == (0, asleep)
    assert home.run("status", "--json").result["holds"] == {
        "asleep": True,
        "slots": None,
        "pages": [],
    }
    assert procfs.identify(pid) is not None
    for words in (("restart",), ("stop",)):
        until(lambda: home.run("status", "--json").result["engine"]["is_sleeping"])
        assert home.run(*words).out.splitlines()[1] == SLEPT, words
    assert SLEPT not in home.run("stop").out
    said = "the engine sleeps: what its slots held is gone, pages stay"
    assert home.paths.daemon_log.read_text().count(said) == 2, "once for each engine"


def test_status_says_that_a_stopped_engine_does_not_answer(home: Home) -> None:
    pid = home.up()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        ran = home.run("status")
        assert ran.rows["slots"].startswith("not known: ")
        assert "no answer" in ran.rows["slots"]
        found = home.run("status", "--json").result
        assert (found["holds"], "no answer" in found["holds_not_known"]) == (None, True)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_status_does_not_wait_for_a_busy_engine(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_unasked(monkeypatch)
    home.up("--fake-mute")
    ran = home.run("status")
    assert ran.code == 0
    assert ran.rows["slots"].startswith("not known: GET /slots: no answer")


def test_committed_memory_is_the_metrics_and_not_zero_before_a_change(home: Home) -> None:
    pid = home.up()["pid"]
    memory = home.run("status", "--json").result["memory"]
    assert memory["committed_bytes"] == psutil.Process(pid).memory_info().data > 0
    assert memory["full_contexts_bytes"] is None
    findings = json.loads(home.run("doctor", "--json").out)["findings"]
    told = next(each["found"] for each in findings if each["check"] == "memory")
    assert "what the engine has committed may take " in told
    assert " 0 B more" not in told


def test_slots_of_an_engine_that_does_not_answer_end_in_time(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_unasked(monkeypatch)
    home.up("--fake-mute")
    ran = home.run("slots", "--timeout", "0.5", "--json")
    assert (ran.code, ran.error["code"]) == (6, "timed_out")
    assert "has not answered within 0.5 s" in ran.error["message"]
    stopped = home.run("status", "--json").result["engine"]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert home.run("pages", "ls", "--timeout", "0.5", "--json").code == 6
    finally:
        os.kill(stopped, signal.SIGCONT)


def test_many_slots_are_one_screen(home: Home) -> None:
    words = home.up_words()
    assert home.run(*words, "-np", "64").code == 0
    lines = home.run("status").out.splitlines()
    assert sum(line.startswith("slot ") for line in lines) == SLOTS_MAX + 1
    assert any("56 more, " in line for line in lines)
    assert len(lines) <= 24
