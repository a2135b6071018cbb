"""A daemon that lives and does not answer is told from one that is not there."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from cli_home import Home, fresh_home
from llamactl_cli.commands.wait import LONG_POLL_S

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Home, int]]:
    with fresh_home() as home:
        yield home, home.up()["daemon_pid"]


@pytest.fixture
def frozen(running: tuple[Home, int]) -> Iterator[tuple[Home, int]]:
    home, pid = running
    os.kill(pid, signal.SIGSTOP)
    try:
        yield home, pid
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "words", [("status",), ("up",), ("down",), ("slots",), ("apply", "-np", "3")]
)
def test_it_is_said_to_live(frozen: tuple[Home, int], words: tuple[str, ...]) -> None:
    home, pid = frozen
    ran = home.run(*(home.up_words() if words == ("up",) else words))
    assert (ran.code, ran.out) == (4, "")
    first, hint = ran.err.splitlines()[-2:]
    assert first == f"llamactl: the daemon (pid {pid}) does not answer"  # asked before an order
    assert f"kill -CONT {pid}" in hint
    assert "adopts" not in ran.err


@pytest.mark.parametrize("words", [("wait",), ("wait", "--ready")])
def test_a_wait_ends_in_its_time(frozen: tuple[Home, int], words: tuple[str, ...]) -> None:
    home, pid = frozen
    began = time.monotonic()
    ran = home.run(*words, "--timeout", "1.5")
    assert ran.code == 6
    assert f"the daemon (pid {pid}) does not answer after 1.5 s" in ran.err
    assert time.monotonic() - began < LONG_POLL_S


def test_a_wait_goes_on_with_a_daemon_that_goes_on(frozen: tuple[Home, int]) -> None:
    home, pid = frozen
    assert home.run("wait", "--timeout", "0.2").code == 6
    os.kill(pid, signal.SIGCONT)
    assert home.run("wait", "--timeout", "20").code == 0
