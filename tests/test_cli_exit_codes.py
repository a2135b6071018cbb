"""Each exit code that scripts rely on, once, by the command that a script would run."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from cli_home import COMMAND, Home, fresh_home
from llamactl_supervisor.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def running() -> Iterator[Home]:
    with fresh_home() as home:
        home.up("--fake-refuse", "context_build_failed", "--fake-busy")
        yield home


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


def test_the_codes_are_those_of_the_contract() -> None:
    assert sorted(ExitCode) == [0, 1, 2, 3, 4, 5, 6, 130]


@pytest.mark.parametrize(
    "words",
    [
        *(("status",), ("status", "--json"), ("ledger",), ("orphans",), ("env",), ("version",)),
        *(("wait",), ("wait", "--ready"), ("start",), ("logs", "-n", "1"), ("top", "--once")),
    ],
)
def test_0_it_was_done(running: Home, words: tuple[str, ...]) -> None:
    assert running.run(*words).code == 0


def test_1_it_failed(home: Home) -> None:
    ran = home.run(*home.up_words("--fake-load-exit", "7"))
    assert (ran.code, ran.out) == (1, "")
    assert home.run("start").code == 1


@pytest.mark.parametrize(
    "words", [("frobnicate",), ("stop", "now"), ("wait", "--timeout", "0"), ("reconfigure", "-c")]
)
def test_2_it_makes_no_sense(running: Home, words: tuple[str, ...]) -> None:
    assert running.run(*words).code == 2
    assert running.run("status").code == 0


def test_3_there_is_no_engine(home: Home) -> None:
    home.up()
    assert home.run("stop").code == 0
    assert home.run("stop").out == "engine already stopped\n"
    for words in (("status",), ("reconfigure", "-c", "8k"), ("slots",), ("pages", "ls")):
        assert home.run(*words).code == 3, words
    assert home.run("restart").code == 0
    assert home.run("status").code == 0


def test_4_there_is_no_daemon(home: Home) -> None:
    for words in (("status",), ("start",), ("stop",), ("restart",), ("wait",), ("top",)):
        ran = home.run(*words)
        assert (ran.code, ran.out) == (4, ""), words


def test_5_it_was_refused(running: Home) -> None:
    ran = running.run("reconfigure", "-c", "128k", "--json")
    assert (ran.code, ran.error["code"]) == (5, "context_build_failed")
    another = running.run(*running.up_words(), "-c", "64k")
    assert another.code == 5


def test_6_it_did_not_happen_in_time(running: Home) -> None:
    ran = running.run("pages", "out", "0", "fox", "--timeout", "0.1", "--json")
    assert ran.code == 6
    assert json.loads(ran.err.splitlines()[-1])["error"]["code"] == "timed_out"


@pytest.mark.parametrize(
    "words",
    ["status --json", "status", "logs", "ledger --json", "--help", "config docs", "completion zsh"],
)
def test_a_closed_stdout_is_a_failure_and_no_traceback(running: Home, words: str) -> None:
    command = f'exec "$@" {words} >&-'
    ran = subprocess.run(["sh", "-c", command, "-", *COMMAND], capture_output=True, timeout=30)
    assert ran.returncode == 1
    assert b"stdout is closed" in ran.stderr
    assert b"Traceback" not in ran.stderr
    assert running.run("status").code == 0


def test_a_closed_stderr_loses_no_result() -> None:
    command = 'exec "$@" version --json 2>&- <&-'
    ran = subprocess.run(["sh", "-c", command, "-", *COMMAND], capture_output=True, timeout=30)
    assert (ran.returncode, json.loads(ran.stdout).keys() >= {"cli"}) == (0, True)
    command = 'exec "$@" frobnicate >&- 2>&-'
    ran = subprocess.run(["sh", "-c", command, "-", *COMMAND], capture_output=True, timeout=30)
    assert (ran.returncode, ran.stderr) == (2, b"")


def test_130_it_was_interrupted(running: Home) -> None:
    with subprocess.Popen([*COMMAND, "logs", "-f"], stdout=subprocess.PIPE) as following:
        assert following.stdout is not None
        following.stdout.readline()
        following.send_signal(2)
        assert following.wait(30) == 130
    assert running.run("status").code == 0


def test_logs_since_reach_over_rotated_files(running: Home) -> None:
    old = running.paths.engine_log.with_name("engine.log.1")
    old.write_text("2026-01-01T00:00:00.000Z stderr old\n2026-01-02T00:00:00.000Z stderr newer\n")
    said = [json.loads(line)["text"] for line in _lines(running, "2026-01-01T12:00Z")]
    assert said[0] == "newer"
    assert "old" not in said
    assert [json.loads(line)["text"] for line in _lines(running, "2100-01-01")] == []
    last = [json.loads(line)["text"] for line in _lines(running, "2026-01-01", "-n", "1")]
    assert last == said[-1:]


def _lines(home: Home, since: str, *more: str) -> list[str]:
    return home.run("logs", "--json", "--since", since, *more).out.splitlines()
