"""`llamactl run` where its daemon ends, hangs or is asked by others as well."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from llamactl_supervisor.models import EngineState
from run_box import LARGE, SMALL, RunBox, owner_pid, stopped
from sandbox import WITHIN_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[RunBox]:
    box = RunBox()
    box.start()
    yield box
    box.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR2])
def test_a_daemon_that_goes_leaves_the_engine_and_the_next_one_has_the_owner(
    box: RunBox, number: signal.Signals
) -> None:
    shim = box.run(*SMALL).ready()
    box.until_state(EngineState.READY)
    pid = box.engine_pid()
    box.client.wait_operation(box.client.reconfigure(n_ctx=32768), timeout_s=WITHIN_S)
    box.daemons[-1].send_signal(number)
    box.daemons[-1].wait(WITHIN_S)
    assert shim.healthy()
    box.start()
    until(lambda: owner_pid(box) == shim.process.pid)
    assert shim.healthy()
    assert box.engine_pid() == pid
    assert shim.props()["context_geometry"]["n_ctx"] == 32768
    assert shim.end() == 0
    until(lambda: box.client.status().lingers_s is not None)


def test_the_next_daemon_goes_by_the_linger_that_was_agreed_on(box: RunBox) -> None:
    shim = box.run(*SMALL).ready()
    until(lambda: box.client.status().state is EngineState.READY)
    box.kill_daemon()
    box.env["LLAMACTL_LINGER_S"] = "99"
    box.start()
    until(lambda: owner_pid(box) == shim.process.pid)
    owner = box.client.status().owner
    assert owner is not None
    assert owner.linger_s == 10


def test_a_daemon_that_hangs_holds_up_nobody_who_ends(box: RunBox) -> None:
    """Nor does it hold up who would wait for his engine's end, once he is told twice."""
    serving = box.run(*SMALL).ready()
    until(lambda: box.client.status().state is EngineState.READY)
    box.daemons[-1].send_signal(signal.SIGSTOP)
    try:
        waiting = box.run(*SMALL)
        assert serving.end() == 0
        assert waiting.end() == -signal.SIGTERM
    finally:
        box.daemons[-1].send_signal(signal.SIGCONT)
    until(lambda: box.client.status().lingers_s is not None)
    last = box.run(*SMALL, options=["--linger", "0"]).ready()
    until(lambda: owner_pid(box) == last.process.pid)
    box.daemons[-1].send_signal(signal.SIGSTOP)
    try:
        last.send(signal.SIGTERM)
        until(lambda: not _takes_connections(last.port))
        assert last.process.poll() is None
        assert last.end() == 1
    finally:
        box.daemons[-1].send_signal(signal.SIGCONT)
    until(lambda: stopped(box))


def _takes_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_where_no_manager_starts_a_daemon_the_shim_does(box: RunBox) -> None:
    shim = box.run(*SMALL).ready()
    pid = box.engine_pid()
    box.kill_daemon()
    until(box.answers)
    until(lambda: owner_pid(box) == shim.process.pid)
    assert box.engine_pid() == pid


def test_who_leaves_while_there_is_no_daemon_leaves_no_orphan(box: RunBox) -> None:
    shim = box.run(*SMALL).ready()
    box.kill_daemon()
    assert shim.end() == 0
    until(box.answers)
    until(lambda: box.client.status().lingers_s is not None)


@pytest.mark.parametrize("how", ["known", "unseen"])
def test_who_leaves_as_the_daemon_dies_leaves_an_engine_that_ends(how: str) -> None:
    """Also where that has not been seen yet: both are there at once when the shim goes on."""
    box = RunBox(reattach_s=0.5)
    box.start()
    try:
        shim = box.run(*SMALL).ready()
        until(lambda: box.client.status().state is EngineState.READY)
        if how == "unseen":
            shim.send(signal.SIGSTOP)
        box.kill_daemon()
        shim.send(signal.SIGTERM)
        shim.send(signal.SIGCONT)
        assert shim.process.wait(WITHIN_S) == 0
        assert "the daemon is gone; another one is started" in shim.err
        until(box.answers)
        until(lambda: stopped(box))
        until(lambda: box.left() == ["expired"])
    finally:
        box.close()


def test_who_waits_for_his_engines_end_has_a_new_daemon_end_it(box: RunBox) -> None:
    """Without a linger it does not stay for who may come back either."""
    shim = box.run(*SMALL, options=["--linger", "0"]).ready()
    until(lambda: box.client.status().state is EngineState.READY)
    pid = box.engine_pid()
    box.kill_daemon()
    assert shim.end() == 0
    assert not psutil.pid_exists(pid)
    until(lambda: box.left() == ["stopped"])


def test_a_start_that_waits_for_a_stopped_daemon_says_so(box: RunBox) -> None:
    daemon = box.daemons[-1]
    daemon.send_signal(signal.SIGSTOP)
    shim = box.run(*SMALL)
    until(lambda: f"the daemon (pid {daemon.pid}) is stopped" in shim.err)
    assert f"kill -CONT {daemon.pid}" in shim.err
    assert shim.process.poll() is None
    daemon.send_signal(signal.SIGCONT)
    shim.ready()


def test_a_start_that_waits_for_the_engine_says_so(box: RunBox) -> None:
    """As behind the prompt of a client that has gone."""
    first = box.run(*SMALL).ready()
    httpx.post(f"{first.url}/fake", json={"slow_s": 6.0}, timeout=WITHIN_S).raise_for_status()
    assert first.end() == 0
    second = box.run(*LARGE)
    until(lambda: "llamactl run: waiting: the engine changes once" in second.err)
    assert second.ready().props()["context_geometry"]["n_ctx"] == 16384


def test_an_engine_that_ends_while_there_is_no_daemon_is_still_exited_like(box: RunBox) -> None:
    shim = box.run(*SMALL).ready()
    pid = box.engine_pid()
    box.daemons[-1].kill()
    os.kill(pid, signal.SIGTERM)
    assert shim.process.wait(WITHIN_S) == 0


def test_nobody_comes_back_and_the_engine_ends() -> None:
    box = RunBox(reattach_s=0.5)
    daemon = box.start()
    try:
        shim = box.run(*SMALL).ready()
        daemon.kill()
        daemon.wait(WITHIN_S)
        shim.process.kill()
        box.start()
        until(lambda: stopped(box))
        until(lambda: box.left() == ["expired"])
    finally:
        box.close()


def test_the_daemon_ends_and_takes_the_owner_with_it(box: RunBox) -> None:
    shim = box.run(*SMALL).ready()
    pid = box.engine_pid()
    box.client.wait_down(timeout_s=WITHIN_S)
    assert shim.process.wait(WITHIN_S) == 0
    assert not psutil.pid_exists(pid)


def test_a_daemon_does_not_load_for_an_owner_that_is_gone(box: RunBox) -> None:
    """In run mode the owner starts; a machine that comes up again loads nothing by itself."""
    shim = box.run(*SMALL).ready()
    box.kill_daemon()
    shim.process.kill()
    for process in box.processes():
        process.kill()
    box.start()
    assert stopped(box)
    assert box.client.status().engine is None


def test_what_somebody_else_changes_is_told_and_the_next_command_line_wins(box: RunBox) -> None:
    shim = box.run(*SMALL).ready()
    box.until_state(EngineState.READY)
    box.client.wait_operation(box.client.reconfigure(n_ctx=32768), timeout_s=WITHIN_S)
    until(lambda: "now n_ctx 32768, n_seq 2" in shim.err)
    assert shim.props()["context_geometry"]["n_ctx"] == 32768
    assert shim.end() == 0
    again = box.run(*SMALL)
    until(again.listens)
    assert again.props()["context_geometry"]["n_ctx"] == 8192


def test_an_engine_of_up_is_not_a_runs_to_have(box: RunBox) -> None:
    box.up()
    shim = box.run(*SMALL)
    assert shim.process.wait(WITHIN_S) == 1
    assert "`llamactl up`" in shim.err
    assert box.client.status().state is EngineState.READY
