"""What only one daemon holds: the lock of its runtime directory, and that of its state directory.

Two daemons with one state directory and a socket each would overwrite each other's record of who
owns which engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llamactl_supervisor.paths import Paths

HOLDER_BYTES_MAX = 8192


@dataclass(frozen=True)
class Holder:
    """The daemon that holds a lock, as it wrote itself into the file."""

    pid: str
    runtime: str

    def __str__(self) -> str:
        return f"daemon pid {self.pid} of {self.runtime}"


@contextlib.contextmanager
def held(paths: Paths) -> Iterator[None]:
    """Hold both locks: the state is ours to read and write. Raises `daemon_running`."""
    with contextlib.ExitStack() as locks:
        for path in (paths.daemon_lock, paths.state_lock):
            locks.callback(os.close, lock(path, paths.runtime))
        yield


def lock(path: Path, runtime: Path) -> int:
    """Take the lock for as long as the returned descriptor lives, or raise `daemon_running`.

    The lock is the kernel's, so it ends with its daemon however that ends. The file says whose it
    is: the daemon's pid, and below it the daemon's runtime directory.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(fd)
        os.close(fd)
        message = f"a daemon (pid {holder.pid}) already runs for {path.parent}"
        if holder.runtime == str(runtime):
            hint = "use it, or end it with `llamactl down`"
        else:
            message += f", with the runtime directory {holder.runtime}"
            hint = "use it with its LLAMACTL_RUNTIME_DIR, or set another LLAMACTL_STATE_DIR as well"
        raise error(
            Code.DAEMON_RUNNING,
            message,
            hint=hint,
            details={"pid": holder.pid, "runtime_dir": holder.runtime},
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode() + os.fsencode(runtime) + b"\n", 0)
    return fd


def owner(path: Path) -> int | None:
    """Return the pid of the daemon that holds the lock; None where none does.

    Only for whoever knows that the daemon is past its beginning: one that begins right now may
    take this look for another daemon.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = _holder(fd).pid
        return int(pid) if pid.isdigit() else None
    else:
        return None
    finally:
        os.close(fd)


def elsewhere(paths: Paths) -> Holder | None:
    """Return the living daemon of another runtime directory that has this state directory.

    The lock is tried only where another directory is written in it, so that asking never gets in
    the way of a daemon of ours that starts.
    """
    try:
        fd = os.open(paths.state_lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        holder = _holder(fd)
        if holder.runtime == str(paths.runtime):
            return None
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder
    finally:
        os.close(fd)
    return None


def _holder(fd: int) -> Holder:
    text = os.fsdecode(os.pread(fd, HOLDER_BYTES_MAX, 0))
    pid, runtime = (*text.split("\n", 2), "", "")[:2]
    return Holder(pid or "unknown", runtime or "unknown")
