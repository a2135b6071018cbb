"""A control socket that a service manager listens on: used, and left where it is."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from sandbox import WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TextIO

LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.setdefault("LISTEN_PID", str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    sandbox.paths.create()
    yield sandbox
    sandbox.close()


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen as the manager does."""
    with socket.socket(socket.AF_UNIX) as handed:
        handed.bind(str(path))
        path.chmod(0o600)
        handed.listen()
        yield handed


def activated(
    box: Sandbox, handed: socket.socket | TextIO, count: str = "1", pid: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a daemon with the socket as descriptor 3, and as meant for `pid`; return at once."""
    fd = handed.fileno()
    serve = (sys.executable, "-m", "llamactl_supervisor", "serve")
    env = box.env | {"LISTEN_FDS": count} | ({} if pid is None else {"LISTEN_PID": pid})
    with (box.root / "daemon.log").open("ab") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(fd), *serve], env=env, stderr=log, pass_fds=[fd]
        )
    box.daemons.append(daemon)
    return daemon


def test_a_question_from_before_the_daemon_is_answered_and_the_socket_stays(box: Sandbox) -> None:
    path = box.paths.control_socket
    with listening(path) as handed, socket.socket(socket.AF_UNIX) as early:
        inode = path.stat().st_ino
        early.connect(str(path))
        early.sendall(b"GET /livez HTTP/1.1\r\nHost: llamactl\r\nConnection: close\r\n\r\n")
        for is_first in (True, False):
            daemon = activated(box, handed)
            if is_first:
                early.settimeout(WITHIN_S)
                assert early.recv(4096).startswith(b"HTTP/1.1 200 OK")
            until(box.answers)
            assert box.client.status().daemon.pid == daemon.pid
            daemon.terminate()
            assert daemon.wait(WITHIN_S) == 0
            assert path.stat().st_ino == inode


def test_the_socket_is_not_the_engines(box: Sandbox) -> None:
    with listening(box.paths.control_socket) as handed:
        activated(box, handed)
        until(box.answers)
        box.up()
        box.client.wait_down(timeout_s=WITHIN_S)
        assert box.processes() == []


def test_what_is_meant_for_another_process_is_not_touched(box: Sandbox) -> None:
    """Inherited by accident: the daemon binds a socket of its own."""
    with listening(box.root / "other.sock") as handed:
        daemon = activated(box, handed, pid="1")
        until(box.answers)
        daemon.terminate()
        assert daemon.wait(WITHIN_S) == 0
        assert not box.paths.control_socket.exists()


@pytest.mark.parametrize(
    ("where", "count", "said"),
    [
        ("other.sock", "1", "other.sock (AF_UNIX), which does not listen at"),
        ("r/control.sock", "2", "LISTEN_FDS='2': one socket is expected"),
        ("r/control.sock", "many", "LISTEN_FDS='many': one socket is expected"),
    ],
)
def test_a_socket_that_no_client_would_find_is_refused(
    box: Sandbox, where: str, count: str, said: str
) -> None:
    with listening(box.root / where) as handed:
        assert activated(box, handed, count).wait(WITHIN_S) == 2
    assert said in box.daemon_log()
    assert (box.root / where).exists()


def test_a_socket_that_does_not_listen_is_refused(box: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as handed:
        handed.bind(str(box.paths.control_socket))
        assert activated(box, handed).wait(WITHIN_S) == 2
    assert "which does not listen" in box.daemon_log()


def test_a_descriptor_that_is_no_socket_is_refused(box: Sandbox) -> None:
    with box.model.open() as file:
        assert activated(box, file).wait(WITHIN_S) == 2
    assert "handed over descriptor 3" in box.daemon_log()
