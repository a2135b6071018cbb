"""A directory for one engine: nobody else can read it, and it is swept when its owner was killed.

The owner holds a lock in it. What nobody holds was left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from llamactl_supervisor import reap, remains
from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.paths import SUN_PATH_BYTES_MAX, Paths

PREFIX = "llamactl-validate-"
LOCK = "lock"
SETTLED_S = 60.0
"""A directory is younger while its owner has not locked it yet."""
SOCKET = "engine.sock"
LONGEST = f"{PREFIX}{8 * 'x'}/r/engine-{32 * '0'}/{SOCKET}"
"""The longest path of a socket in a workplace: that of an engine with a daemon."""


class Workplace:
    """Raises `path_too_long` where the temporary directory leaves a socket's path no room."""

    def __init__(self) -> None:
        check_paths()
        # Not below a test's own directory: a socket's path is bounded.
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = None
        self.paths = _paths(self.path)
        self.socket = self.path / SOCKET
        self.slot_files = self.path / "slots"
        self.log = self.path / "log"
        try:
            self._lock = _locked(self.path)
            self.slot_files.mkdir(mode=0o700)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove it; an engine whose warden was killed has outlived that, and ends first."""
        with contextlib.suppress(LlamactlError, OSError):
            _end_engines(self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def check_paths() -> None:
    """Raise `path_too_long` where the temporary directory leaves the path of a socket no room."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(f"{parent}/{LONGEST}")) > SUN_PATH_BYTES_MAX:
        raise error(
            Code.PATH_TOO_LONG,
            f"the path of a socket in {parent} would have more than {SUN_PATH_BYTES_MAX} bytes",
            hint="set TMPDIR to a directory with a shorter path",
        )


def sweep(parent: Path | None = None) -> list[Path]:
    """End and remove what killed owners left, and return it; another user's is not touched."""
    swept = []
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        with contextlib.suppress(LlamactlError, OSError):
            found = path.lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < SETTLED_S:
                continue
            lock = _locked(path)
            if lock is not None:
                _end_engines(path)
                shutil.rmtree(path)
                os.close(lock)
                swept.append(path)
    return swept


def _paths(place: Path) -> Paths:
    """Return the directories of a daemon that has this place."""
    return Paths(*(place / name for name in ("c", "s", "r")))


def _end_engines(place: Path) -> None:
    """Kill every engine that is proven to have been started in it."""
    paths = _paths(place)
    for remnant in remains.recorded(paths):
        if remnant.doubt is None:
            reap.end(paths, remnant, 0.0)


def _locked(path: Path) -> int | None:
    """Lock a workplace; None where somebody else has it."""
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
