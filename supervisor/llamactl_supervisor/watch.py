"""Whether a file is another one than it was: by where its path leads and what it holds.

A path that is replaced as a whole, as a directory of links is that Kubernetes fills, changes like
any other; no watch of the kernel follows that, and none works on every file system.
"""

from __future__ import annotations

import hashlib
import os
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_Look = tuple[str, tuple[int, ...]]


class Seen(Enum):
    """What a look at a file comes to."""

    SAME = "same"
    UNSETTLED = "unsettled"
    """It is not as it was at the look before: somebody may still be writing it."""
    CHANGED = "changed"
    """It is another one, and two looks have found it alike."""


class Watch:
    """Looks at one file. It reads; call it in a thread.

    `digest` is the SHA-256 of what was in it when it was read, or last seen to be a settled change;
    None: there was none.
    """

    def __init__(self, digest: str | None) -> None:
        """Begin with what was read."""
        self.digest = digest
        self._last: _Look | None = None
        self._known: _Look | None = None

    def look(self, path: Path | None) -> Seen:
        """Say whether what is in the file has changed; None and no file are one.

        What is written bit by bit, or emptied before it is filled, is no change before it has been
        the same for two looks. What cannot be read is as good as another file each time that it
        looks otherwise.
        """
        before, self._last = self._last, None if path is None else _look(path)
        if self._last != before:
            return Seen.UNSETTLED
        if self._last == self._known:
            return Seen.SAME
        known = self.digest
        self._known = self._last
        self.digest = None if path is None or self._last is None else _digest(path)
        return Seen.SAME if self.digest == known else Seen.CHANGED


def _look(path: Path) -> _Look | None:
    try:
        found = path.stat()
        return os.path.realpath(path), (
            *(found.st_dev, found.st_ino, found.st_size, found.st_mode, found.st_uid),
            *(found.st_mtime_ns, found.st_ctime_ns),
        )
    except OSError:
        return None


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        return str(exc)
