"""A daemon where none runs: started beside this process, and awaited until its socket answers.

from llamactl_supervisor.client import Client
from llamactl_supervisor.spawn import spawn_daemon
llama = Client()
spawn_daemon(llama.paths)
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, BinaryIO

from llamactl_supervisor import locks
from llamactl_supervisor.client import Client
from llamactl_supervisor.config import daemon_env
from llamactl_supervisor.errors import Code, DaemonUnreachableError, LlamactlError, error
from llamactl_supervisor.models import Problem
from llamactl_supervisor.paths import make_private_dir

if TYPE_CHECKING:
    from llamactl_supervisor.paths import Paths

START_S = 30.0
"""How long a new daemon may take until its socket answers."""
START_POLL_S = 0.02
"""Pause between two tries to reach it."""


def spawn_daemon(paths: Paths) -> None:
    """Start a daemon that outlives this process; return when its control socket answers.

    The daemon has its own session and none of our descriptors: its output goes to the daemon log.
    It adopts an engine that still runs, and loads none from its saved intent.
    Raises the daemon's own error if it says why it cannot start, else `daemon_start_failed` with
    the log's last lines; `daemon_running` where a daemon of another runtime directory has this
    state directory.
    """
    if (holder := locks.elsewhere(paths)) is not None:
        raise error(
            Code.DAEMON_RUNNING,
            f"{holder} already runs for {paths.state}",
            hint="use it with its LLAMACTL_RUNTIME_DIR, or set another LLAMACTL_STATE_DIR as well",
            details={"pid": holder.pid, "runtime_dir": holder.runtime},
        )
    make_private_dir(paths.state)
    make_private_dir(paths.logs)
    argv = [sys.executable, "-P", "-m", "llamactl_supervisor", "serve", "--no-resume"]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log_fd = os.open(paths.daemon_log, flags, 0o600)
    log_offset = os.fstat(log_fd).st_size
    problem_fd, write_fd = os.pipe()
    argv += ["--problem-fd", str(write_fd)]
    try:
        daemon = subprocess.Popen(
            argv,
            pass_fds=(write_fd,),
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            start_new_session=True,
            env=daemon_env(paths),
            cwd="/",
        )
    except BaseException:
        os.close(problem_fd)
        raise
    finally:
        os.close(log_fd)
        os.close(write_fd)
    try:
        with os.fdopen(problem_fd, "rb") as problem:
            _wait_socket(paths, daemon, problem, log_offset)
    finally:
        # It is not ours to wait for any more: without this, Popen warns that it still runs.
        daemon.returncode = daemon.returncode or 0


def _wait_socket(
    paths: Paths, daemon: subprocess.Popen[bytes], problem: BinaryIO, log_offset: int
) -> None:
    deadline = time.monotonic() + START_S
    daemon_fd = os.pidfd_open(daemon.pid)
    poll = select.poll()
    poll.register(daemon_fd, select.POLLIN)
    exited = another = False
    try:
        with Client(paths) as client:
            while True:
                if exited:
                    time.sleep(START_POLL_S)
                elif poll.poll(START_POLL_S * 1000):
                    exited = True
                    daemon.wait()
                try:
                    client.status()
                except DaemonUnreachableError:
                    if exited and not another:
                        another = _another_was_first(problem)
                    if (exited and not another) or time.monotonic() > deadline:
                        raise _start_failed(paths, daemon, log_offset) from None
                else:
                    return
    finally:
        os.close(daemon_fd)


def _another_was_first(problem: BinaryIO) -> bool:
    """Return whether another caller's daemon runs, which will answer for both of us.

    Raises what else the daemon that has ended says of itself; False: it said nothing.
    """
    said = problem.read()
    if not said:
        return False
    found = Problem.model_validate_json(said)
    if found.code != Code.DAEMON_RUNNING:
        raise found.to_error()
    return True


def _start_failed(paths: Paths, daemon: subprocess.Popen[bytes], log_offset: int) -> LlamactlError:
    with paths.daemon_log.open("rb") as log:
        log.seek(log_offset)
        lines = log.read().decode(errors="replace").splitlines()[-20:]
    status = daemon.poll()
    what = "does not answer" if status is None else f"exited with status {status}"
    return error(
        Code.DAEMON_START_FAILED,
        f"the daemon was started and {what}",
        hint=f"see {paths.daemon_log}",
        details={"exit_status": status, "last_lines": lines},
    )
