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


class Held:
    """Both locks of the living daemon: the state is its own to read and write."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self._fds: dict[Path, int] = {}

    def renew(self) -> None:
        """Take what is not held, or whose file is gone: another daemon would not find it locked.

        Raises `daemon_running` where one was faster, OSError where a file cannot be made.
        """
        for path in self._missing():
            fd = self._fds.get(path)
            self._fds[path] = lock(path, self.paths.runtime)
            if fd is not None:
                os.close(fd)

    def whole(self) -> bool:
        """Say whether another daemon would find both."""
        return not self._missing()

    def _missing(self) -> list[Path]:
        return [
            path
            for path in (self.paths.daemon_lock, self.paths.state_lock)
            if (fd := self._fds.get(path)) is None
            or not path.exists()
            or not os.path.samestat(path.stat(), os.fstat(fd))
        ]

    def release(self) -> None:
        """Let go of both."""
        while self._fds:
            os.close(self._fds.popitem()[1])


@contextlib.contextmanager
def held(paths: Paths) -> Iterator[Held]:
    """Hold both locks meanwhile. Raises `daemon_running`."""
    locks = Held(paths)
    try:
        locks.renew()
        yield locks
    finally:
        locks.release()


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


@contextlib.contextmanager
def alone(paths: Paths) -> Iterator[bool | None]:
    """Keep every daemon of this runtime directory from beginning.

    Yields False where one lives, None where there never was one.
    """
    try:
        fd = os.open(paths.daemon_lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)


def daemon_lives(paths: Paths) -> bool:
    """Return whether a daemon lives in this runtime directory, answering or not."""
    with alone(paths) as found:
        return found is False


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
