"""The daemon's own log file, kept small. Only the one that `up` opens: any other is its owner's."""

from __future__ import annotations

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path


def rotate(path: Path, bytes_max: int, files_max: int) -> None:
    """Let the root logger write to `path` with rotation, if that is where stderr goes."""
    try:
        ours = path.samefile(f"/proc/self/fd/{sys.stderr.fileno()}")
    except (OSError, ValueError):
        return
    if ours:
        root = logging.getLogger()
        [before] = root.handlers
        after = _Rotating(path, maxBytes=bytes_max, backupCount=files_max - 1, encoding="utf-8")
        after.setFormatter(before.formatter)
        root.handlers = [after]


class _Rotating(RotatingFileHandler):
    """Takes stdout and stderr along, for what the interpreter itself has to say.

    A file that was removed, or its directory, is made again.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._keep()
        except OSError:
            self.handleError(record)
        else:
            super().emit(record)

    def _keep(self) -> None:
        path = Path(self.baseFilename)
        if self.stream is None or (path.exists() and path.samefile(f"/proc/self/fd/{self._fd}")):
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.stream.close()
        self.stream = self._open()
        self._take_along()

    @property
    def _fd(self) -> int:
        assert self.stream is not None
        return self.stream.fileno()

    def doRollover(self) -> None:  # noqa: N802 - logging's name
        super().doRollover()
        self._take_along()

    def _take_along(self) -> None:
        for number in (1, 2):
            os.dup2(self._fd, number)
