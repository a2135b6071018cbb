"""The daemon's own log file, kept small. Only the one that `up` opens: any other is its owner's."""

from __future__ import annotations

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    """Takes stdout and stderr along, for what the interpreter itself has to say."""

    def doRollover(self) -> None:  # noqa: N802 - logging's name
        super().doRollover()
        assert self.stream is not None
        for number in (1, 2):
            os.dup2(self.stream.fileno(), number)
