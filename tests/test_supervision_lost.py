"""What is taken from under a daemon: sockets, directories, its engine's holder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineState
from sandbox import WITHIN_S, Sandbox, until
from supervised import IDLE_S, causes, until_generation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=1, crashes_max=2, wedge_idle_s=IDLE_S)
    yield sandbox
    sandbox.close()


def socket_of(box: Sandbox) -> Path:
    (path,) = box.paths.runtime.glob("engine-*/engine.sock")
    return path


@pytest.mark.parametrize("fake", [(), ("--fake-keep-alive",)])
def test_an_engine_whose_socket_lost_its_name_is_told_of_and_held(
    box: Sandbox, fake: tuple[str, ...]
) -> None:
    """Whether a connection is open or not: it can be changed, and replaced without a loss."""
    box.start()
    box.up(*fake)
    box.say(tokens={"0": 700, "1": 9})
    socket_of(box).unlink()
    problem = until(lambda: box.client.status().problem)
    assert problem is not None
    assert problem.code == "engine_socket_gone"
    assert "this daemon still has hold of it" in problem.message
    until(lambda: "this daemon still has hold of it" in box.daemon_log())
    box.client.wait_operation(box.client.reconfigure(n_ctx=131072), timeout_s=WITHIN_S)
    assert box.client.status().problem == problem
    box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert box.client.status().problem is None
    held = [slot.n_prompt_tokens for slot in box.client.slots().slots]
    assert held == [700, 9]


def test_an_engine_whose_directory_is_gone_serves_on(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    shutil.rmtree(box.paths.runtime)
    left = time.monotonic() + 3 * IDLE_S
    until(lambda: time.monotonic() > left)
    url = f"http://127.0.0.1:{box.port}/props"
    assert httpx.get(url, timeout=WITHIN_S).is_success
    assert psutil.pid_exists(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: causes(box) == ["up", "crash"])
    assert httpx.get(url, timeout=WITHIN_S).is_success
    assert box.paths.runtime.stat().st_mode & 0o777 == 0o700


def test_a_socket_that_comes_back_is_used_again(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    path = socket_of(box)
    path.rename(path.with_name("aside"))
    until(lambda: box.client.status().problem)
    path.with_name("aside").rename(path)
    until(lambda: box.client.status().problem is None)
    assert box.engine_pid() == pid


def test_the_next_daemon_takes_an_engine_whose_socket_is_gone_as_it_is(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    box.kill_daemon()
    socket_of(box).unlink()
    box.start()
    box.until_state(EngineState.READY)
    left = time.monotonic() + 3 * IDLE_S
    until(lambda: time.monotonic() > left)
    status = box.client.status()
    assert (box.engine_pid(), status.state, status.weight_loads) == (pid, EngineState.READY, 1)
    assert status.problem is not None
    assert status.problem.code == "engine_socket_gone"
    assert "it serves, but can be neither observed nor reconfigured" in status.problem.message
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.reconfigure(n_ctx=131072), timeout_s=WITHIN_S)
    assert caught.value.code == "engine_socket_gone"


def test_a_load_that_works_is_waited_for_though_its_holder_stands_still() -> None:
    box = Sandbox(ready_stall_s=2, ready_poll_s=0.1, stop_term_s=1)
    with contextlib.closing(box):
        box.start()
        loading = box.client.up(box.request("--fake-load-s", "5", "--fake-spin"))
        engine = until(lambda: box.client.status().engine)
        assert engine is not None
        assert engine.holder_pid is not None
        os.kill(engine.holder_pid, signal.SIGSTOP)
        box.client.wait_operation(loading, timeout_s=WITHIN_S)
        assert (box.client.status().generation, box.engine_pid()) == (1, engine.pid)


def test_a_holder_that_goes_on_too_late_is_reaped_and_heard() -> None:
    box = Sandbox(holder_exit_s=0.5)
    with contextlib.closing(box):
        box.start()
        pid = box.up()
        engine = box.client.status().engine
        assert engine is not None
        assert engine.holder_pid is not None
        os.kill(engine.holder_pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        until_generation(box, 2)
        until(lambda: not psutil.pid_exists(engine.holder_pid or 0))
        until(lambda: box.client.status().last_exit.signal == signal.SIGKILL)  # type: ignore[union-attr]
        box.client.wait_down(timeout_s=WITHIN_S)
        assert box.leftovers() == []


def test_a_state_directory_that_is_removed_is_made_again_with_lock_and_state(box: Sandbox) -> None:
    daemon = box.start()
    pid = box.up()
    shutil.rmtree(box.paths.state)
    until(box.paths.state_file.exists)
    box.env["LLAMACTL_RUNTIME_DIR"] = str(box.root / "r2")
    assert box.spawn().wait(WITHIN_S) == 5, "another daemon finds the state in use"
    box.env["LLAMACTL_RUNTIME_DIR"] = str(box.root / "r")
    daemon.kill()
    daemon.wait(WITHIN_S)
    box.start()
    box.until_state(EngineState.READY)
    assert box.engine_pid() == pid


def stop_holder(box: Sandbox) -> int:
    """Stop the holder of the engine that runs; return its pid."""
    engine = box.client.status().engine
    assert engine is not None
    assert engine.holder_pid is not None
    os.kill(engine.holder_pid, signal.SIGSTOP)
    return engine.holder_pid


def test_an_engine_whose_holder_is_stopped_is_not_replaced_and_the_holder_is_named(
    box: Sandbox,
) -> None:
    box.start()
    pid = box.up()
    holder = stop_holder(box)
    box.say(n_ubatches=7, is_working=True)
    problem = until(lambda: box.client.status().problem)
    assert problem is not None
    assert problem.code == "holder_stopped"
    assert f"(pid {holder})" in problem.message
    assert f"kill -CONT {holder}" in (problem.hint or "")
    left = time.monotonic() + 3 * IDLE_S
    until(lambda: time.monotonic() > left)
    assert (box.client.status().state, box.engine_pid()) == (EngineState.READY, pid)
    os.kill(holder, signal.SIGCONT)
    assert until_generation(box, 2).weight_loads == 2, "now the standstill is its own"


def test_a_stopped_holder_is_no_problem_any_more_once_it_goes_on(box: Sandbox) -> None:
    box.start()
    box.up()
    holder = stop_holder(box)
    until(lambda: box.client.status().problem)
    os.kill(holder, signal.SIGCONT)
    until(lambda: box.client.status().problem is None)


def test_down_leaves_no_stopped_holder_behind() -> None:
    box = Sandbox(holder_exit_s=0.5)
    with contextlib.closing(box):
        box.start()
        box.up()
        stop_holder(box)
        box.client.wait_down(timeout_s=WITHIN_S)
        until(lambda: box.leftovers() == [])


def test_a_holder_that_was_killed_is_missed_by_every_daemon(box: Sandbox) -> None:
    daemon = box.start()
    box.up()
    os.kill(stop_holder(box), signal.SIGKILL)
    for _ in range(2):
        problem = until(lambda: box.client.status().problem)
        assert problem is not None
        assert problem.code == "holder_lost"
        assert "restart` when convenient" in (problem.hint or "")
        daemon.kill()
        daemon.wait(WITHIN_S)
        daemon = box.start()
        box.until_state(EngineState.READY)
    box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert box.client.status().problem is None
