"""Reading the engine's log: its last lines over rotated files, then new ones as they come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import deque
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

POLL_S = 0.2
"""How often a followed log is looked at."""
CHUNK_BYTES = 65536
MAY_BE_LOST = "lines may be lost before this one: the log was rotated faster than it was read"


def _files(path: Path) -> list[IO[bytes]]:
    """Open every file of the log, the newest first, each once.

    In this order none is missed by a rotation under way: it only moves a file to where we come
    later.
    """
    numbers = sorted(
        int(file.suffix[1:])
        for file in path.parent.glob(f"{path.name}.*")
        if file.suffix[1:].isdecimal()
    )
    numbers.append(numbers[-1] + 1 if numbers else 1)
    files: dict[tuple[int, int], IO[bytes]] = {}
    for file in (path, *(path.with_name(f"{path.name}.{number}") for number in numbers)):
        with contextlib.suppress(FileNotFoundError):
            opened = file.open("rb")
            if files.setdefault(_identity(opened), opened) is not opened:
                opened.close()
    return list(files.values())


def _identity(file: IO[bytes]) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _last(path: Path, count: int, since: datetime | None) -> tuple[list[bytes], IO[bytes] | None]:
    """Return the last `count` lines from `since` on and the newest file, open behind them."""
    # A line begins with its UTC time in a form of one length: later is greater.
    stamp = (
        b""
        if since is None
        else since.astimezone(UTC).isoformat(timespec="milliseconds")[:23].encode()
    )
    lines: deque[bytes] = deque(maxlen=count)
    files = _files(path)
    for file in reversed(files):
        lines.extend(line for line in file if line >= stamp)
    for file in files[1:]:
        file.close()
    return list(lines), files[0] if files else None


def last(path: Path, count: int, since: datetime | None = None) -> list[str]:
    """Return the last `count` lines, those from `since` on, without line ends; none of no log."""
    lines, newest = _last(path, count, since)
    if newest is not None:
        newest.close()
    return [line.decode(errors="replace").rstrip("\n") for line in lines]


def _after(path: Path, current: IO[bytes] | None) -> tuple[IO[bytes] | None, bool]:
    """Return the file that comes after `current` (None: the first), None while there is none.

    And whether files between the two may be gone: where `current` is gone itself, nothing says
    how many have followed it.
    """
    files = _files(path)
    known = [] if current is None else [_identity(current)]
    newer = list(itertools.takewhile(lambda file: _identity(file) not in known, files))
    for file in files:
        if file not in newer[-1:]:
            file.close()
    gone = bool(newer) and current is not None and len(newer) == len(files)
    return newer[-1] if newer else None, gone


def _rotated(path: Path, current: IO[bytes]) -> bool:
    try:
        return not path.samefile(f"/proc/self/fd/{current.fileno()}")
    except FileNotFoundError:
        return True


def _notice() -> bytes:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return f"{now} daemon {MAY_BE_LOST}\n".encode()


async def read(
    path: Path,
    count: int,
    *,
    follow: bool,
    until: asyncio.Event,
    since: datetime | None = None,
) -> AsyncIterator[bytes]:
    """Yield the last `count` lines, those from `since` on, in chunks.

    With `follow`, also what comes, until `until`: file after file, and a line that says so where
    some may have been rotated away unread.
    """
    lines, current = await asyncio.to_thread(_last, path, count, since)
    yield b"".join(lines)
    try:
        while follow:
            # Both asked before reading: what comes until then is still read.
            ending = until.is_set()
            rotated = current is not None and _rotated(path, current)
            while current is not None and (chunk := current.read(CHUNK_BYTES)):
                yield chunk
            if rotated or current is None:
                following, gone = _after(path, current)
                if following is not None:
                    if current is not None:
                        current.close()
                    current = following
                    if gone:
                        yield _notice()
                    continue
            if ending:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), POLL_S)
    finally:
        if current is not None:
            current.close()
