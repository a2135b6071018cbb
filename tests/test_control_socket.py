"""A control socket that vanishes under a living daemon: bound again, or said to be gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor.client import Client
from llamactl_supervisor.models import EngineState
from llamactl_supervisor.paths import Paths
from manager import Manager
from sandbox import WITHIN_S, Sandbox, until
from test_activation import activated, listening

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLLOW = b"GET /v1/logs?follow=true HTTP/1.1\r\nHost: llamactl\r\n\r\n"


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=1)
    yield sandbox
    sandbox.close()


def ended(connection: socket.socket) -> bool:
    """Say whether the other end has hung up, after what it still sent."""
    with contextlib.suppress(BlockingIOError):
        while connection.recv(4096):
            pass
        return True
    return False


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_socket_that_is_removed_is_bound_again_and_nobody_is_hung_up_on(box: Sandbox) -> None:
    daemon = box.start()
    pid = box.up()
    for round_ in range(2):
        with socket.socket(socket.AF_UNIX) as early:
            early.settimeout(WITHIN_S)
            early.connect(str(box.paths.control_socket))
            early.sendall(FOLLOW)
            assert early.recv(4096).startswith(b"HTTP/1.1 200 OK")
            box.paths.control_socket.unlink()
            until(box.answers)
            early.setblocking(False)
            assert not ended(early)
        assert box.daemon_log().count("is gone: bound again") == round_ + 1
    assert mode(box.paths.control_socket) == 0o600
    status = box.client.status()
    assert (status.daemon.pid, status.daemon.problem) == (daemon.pid, None)
    assert (status.state, box.engine_pid()) == (EngineState.READY, pid)
    box.client.wait_down(timeout_s=WITHIN_S)
    assert daemon.wait(WITHIN_S) == 0
    assert box.leftovers() == []


def test_a_runtime_directory_that_is_removed_is_made_and_locked_again(box: Sandbox) -> None:
    """As at the last logout of its user."""
    daemon = box.start()
    shutil.rmtree(box.paths.runtime)
    until(box.answers)
    assert mode(box.paths.runtime) == 0o700
    assert box.spawn().wait(WITHIN_S) == 5
    assert f"a daemon (pid {daemon.pid}) already runs for {box.paths.runtime}" in box.daemon_log()
    box.up()
    box.client.wait_down(timeout_s=WITHIN_S)
    assert box.leftovers() == []


def test_one_that_cannot_be_bound_yet_is_said_once_and_tried_again(box: Sandbox) -> None:
    manager = Manager.at(box.root / "notify")
    box.env["NOTIFY_SOCKET"] = manager.address
    with contextlib.closing(manager):
        daemon = box.start()
        shutil.rmtree(box.paths.runtime)
        box.paths.runtime.write_text("in the way")
        gone = f"STATUS=the control socket {box.paths.control_socket} is gone"
        manager.until(gone)
        box.paths.runtime.unlink()
        until(box.answers)
        manager.until("STATUS=stopped")
    assert daemon.poll() is None
    assert box.daemon_log().count("cannot be bound again") == 1


def test_one_that_another_daemon_has_by_now_is_left_to_it(box: Sandbox) -> None:
    daemon = box.start()
    daemon.send_signal(signal.SIGSTOP)  # else it may be the first to bind it again
    shutil.rmtree(box.paths.runtime)
    other = box.env | {"LLAMACTL_STATE_DIR": str(box.root / "other")}
    command = [sys.executable, "-m", "llamactl_supervisor", "serve"]
    with (box.root / "daemon.log").open("ab") as log:
        box.daemons.append(subprocess.Popen(command, env=os.environ | other, stderr=log))
    until(box.answers)
    daemon.send_signal(signal.SIGCONT)
    until(lambda: "cannot be bound again: a daemon (pid" in box.daemon_log())
    assert box.client.status().daemon.pid == box.daemons[-1].pid
    daemon.terminate()
    assert daemon.wait(WITHIN_S) == 0
    assert box.client.status().daemon.pid == box.daemons[-1].pid


def test_one_of_systemds_is_not_ours_to_bind_and_is_said_to_be_gone(box: Sandbox) -> None:
    box.paths.create()
    manager = Manager.at(box.root / "notify")
    box.env["NOTIFY_SOCKET"] = manager.address
    path = box.paths.control_socket
    with contextlib.closing(manager), listening(path) as handed:
        daemon = activated(box, handed)
        until(box.answers)
        aside = Paths(box.paths.cache, box.paths.state, box.root / "aside")
        aside.runtime.mkdir()
        path.rename(aside.control_socket)  # as good as gone, and we can still ask through it
        manager.until(f"STATUS=the control socket {path} is gone: systemd")
        assert not path.exists()
        problem = Client(aside).status().daemon.problem
        assert problem is not None
        assert problem.code == "control_socket_gone"
        assert "systemctl restart llamactl.socket llamactl.service" in (problem.hint or "")
        daemon.terminate()
        assert daemon.wait(WITHIN_S) == 0
    assert box.daemon_log().count("systemd goes on to listen") == 1
