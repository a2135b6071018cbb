"""A lock file: one process at a time, released by the kernel whatever happens to its holder."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llamactl_builder.progress import Progress, ProgressCallback

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def held(path: Path, what: str, progress: ProgressCallback) -> Iterator[None]:
    """Hold the lock at `path`, saying so when another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(Progress(f"waiting for another process that is {what}"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
