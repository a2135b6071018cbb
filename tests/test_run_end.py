"""How a `llamactl run` ends, and its engine, row by row of what is promised of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_supervisor.models import EngineState
from run_box import COMMAND, SMALL, RunBox, owner_pid, stopped
from sandbox import WITHIN_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

LINGER_S = 10.0
"""What an engine lingers for where nobody says otherwise."""


@pytest.fixture
def box() -> Iterator[RunBox]:
    box = RunBox()
    box.start()
    yield box
    box.close()


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_serving_is_an_end_and_waits_for_no_linger(
    box: RunBox, number: signal.Signals
) -> None:
    shim = box.run(*SMALL).ready()
    began = time.monotonic()
    assert shim.end(number) == 0
    assert time.monotonic() - began < LINGER_S
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", shim.port)) != 0
    until(lambda: owner_pid(box) is None)
    status = box.client.status()
    assert status.state is EngineState.READY
    assert status.lingers_s is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_loading_is_died_of_and_the_load_aborted(
    box: RunBox, number: signal.Signals
) -> None:
    shim = box.run(*SMALL, "--fake-never-ready")
    until(lambda: box.client.status().engine)
    assert shim.end(number) == -number
    until(lambda: stopped(box))
    until(lambda: box.left() == ["aborted"])
    assert box.loads() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_has_seen_the_engine_healthy_leaves_no_load(number: signal.Signals) -> None:
    """Its daemon looks only now and then, and has not seen it yet."""
    box = RunBox(ready_poll_s=0.5)
    box.start()
    try:
        shim = box.run(*SMALL, "--fake-load-s", "0.5").ready()
        ends = -number if number == signal.SIGHUP else 0
        assert shim.end(number) == ends
        until(lambda: box.client.status().lingers_s is not None)
        assert box.client.status().state is EngineState.READY
        assert box.left() == []
    finally:
        box.close()


def test_a_hangup_is_an_end_by_that_signal(box: RunBox) -> None:
    assert box.run(*SMALL).ready().end(signal.SIGHUP) == -signal.SIGHUP
    until(lambda: box.client.status().lingers_s is not None)


def test_under_nohup_a_hangup_is_nothing(box: RunBox) -> None:
    shim = box.run(*SMALL, prefix=["nohup"]).ready()
    shim.send(signal.SIGHUP)
    assert shim.healthy()
    assert shim.end() == 0


def test_a_killed_owner_has_left(box: RunBox) -> None:
    assert box.run(*SMALL).ready().end(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: box.client.status().lingers_s is not None)
    box.run(*SMALL).ready()
    assert box.loads() == ["run"]


def test_nobody_comes_and_the_engine_ends() -> None:
    box = RunBox(linger_s=0.5)
    box.start()
    try:
        assert box.run(*SMALL).ready().end() == 0
        until(lambda: stopped(box))
        until(lambda: box.left() == ["expired"])
        box.run(*SMALL).ready()
        until(lambda: box.loads() == ["run", "run"])
    finally:
        box.close()


def test_without_a_linger_the_shim_ends_after_its_engine(box: RunBox) -> None:
    shim = box.run(*SMALL, options=["--linger", "0"]).ready()
    pid = box.engine_pid()
    assert shim.end() == 0
    assert not psutil.pid_exists(pid)
    until(lambda: box.left() == ["stopped"])


def test_a_second_signal_is_an_end_at_once(box: RunBox) -> None:
    """The first one waits for an engine that does not end on TERM."""
    shim = box.run(*SMALL, "--fake-ignore-term", options=["--linger", "0"]).ready()
    shim.send(signal.SIGTERM)
    until(lambda: box.client.status().state is EngineState.STOPPING)
    assert shim.process.poll() is None
    assert shim.end(signal.SIGINT) == 1


def test_a_stop_ends_what_lingers_but_no_owner_unless_now(box: RunBox) -> None:
    shim = box.run(*SMALL).ready()
    command = [*COMMAND[:-1], "stop"]
    env = os.environ | box.env
    declined = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert declined.returncode == 5
    assert f"pid {shim.process.pid}" in declined.stderr
    assert shim.healthy()
    assert subprocess.run([*command, "--now"], env=env, check=False).returncode == 0
    assert shim.process.wait(WITHIN_S) == 0
    assert box.run(*SMALL).ready().end() == 0
    assert subprocess.run(command, env=env, check=False).returncode == 0
    assert stopped(box)
    until(lambda: box.left() == ["stopped"])


def test_a_shortage_of_memory_ends_what_lingers() -> None:
    """The kernel's own measure, with a bound that is always passed."""
    box = RunBox(linger_pressure="0")
    box.start()
    try:
        shim = box.run(*SMALL).ready()
        assert shim.healthy()
        assert shim.end() == 0
        until(lambda: stopped(box))
        until(lambda: box.left() == ["pressure"])
    finally:
        box.close()


# --- the engine's own end ------------------------------------------------------------------------


def test_an_engine_that_exits_is_exited_like_and_not_loaded_again(box: RunBox) -> None:
    """Its last words are written before that."""
    shim = box.run(*SMALL, "--fake-lives-s", "1")
    assert shim.process.wait(WITHIN_S) == 7
    assert shim.err.endswith("fatal: the fake engine dies\n")
    status = box.client.status()
    assert (status.state, status.owner) == (EngineState.STOPPED, None)
    until(lambda: list(box.paths.crashes.iterdir()))
    assert box.loads() == ["run"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_an_engine_that_dies_by_a_signal_is_died_like(box: RunBox, number: signal.Signals) -> None:
    shim = box.run(*SMALL).ready()
    os.kill(box.engine_pid(), number)
    assert shim.process.wait(WITHIN_S) == -number
    assert not list(box.root.glob("core*"))


def test_a_load_that_fails_is_the_engines_own_end(box: RunBox) -> None:
    shim = box.run(*SMALL, "--fake-load-exit", "1")
    assert shim.process.wait(WITHIN_S) == 1
    assert "error: this model cannot be loaded" in shim.err
    assert stopped(box)


def test_an_engine_that_ends_while_nobody_has_it_is_loaded_by_the_next(box: RunBox) -> None:
    assert box.run(*SMALL).ready().end() == 0
    os.kill(box.engine_pid(), signal.SIGKILL)
    until(lambda: stopped(box))
    until(lambda: box.left() == ["exited"])
    box.run(*SMALL).ready()
    until(lambda: box.loads() == ["run", "run"])
