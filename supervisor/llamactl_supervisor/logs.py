"""Reading the engine's log: its last lines over rotated files, then new ones as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from datetime import UTC
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime
    from pathlib import Path

POLL_S = 0.2
"""How often a followed log is looked at."""
CHUNK_BYTES = 65536


def _last(path: Path, count: int, since: datetime | None) -> tuple[list[bytes], IO[bytes] | None]:
    """Return the last `count` lines from `since` on and the current file, open behind them."""
    # A line begins with its UTC time in a form of one length: later is greater.
    stamp = (
        b""
        if since is None
        else since.astimezone(UTC).isoformat(timespec="milliseconds")[:23].encode()
    )
    lines: deque[bytes] = deque(maxlen=count)
    rotated = sorted(
        (file for file in path.parent.glob(f"{path.name}.*") if file.suffix[1:].isdigit()),
        key=lambda file: -int(file.suffix[1:]),
    )
    for file in rotated:
        try:
            with file.open("rb") as old:
                lines.extend(line for line in old if line >= stamp)
        except FileNotFoundError:
            continue
    current = _open(path)
    if current is not None:
        lines.extend(line for line in current if line >= stamp)
    return list(lines), current


def _open(path: Path) -> IO[bytes] | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _rotated(path: Path, current: IO[bytes]) -> bool:
    try:
        return not path.samefile(f"/proc/self/fd/{current.fileno()}")
    except FileNotFoundError:
        return True


async def read(
    path: Path,
    count: int,
    *,
    follow: bool,
    until: asyncio.Event,
    since: datetime | None = None,
) -> AsyncIterator[bytes]:
    """Yield the last `count` lines, those from `since` on, in chunks.

    With `follow`, also what comes, until `until`.
    """
    lines, current = await asyncio.to_thread(_last, path, count, since)
    yield b"".join(lines)
    try:
        while follow:
            # Both asked before reading: what comes until then is still read.
            ending = until.is_set()
            rotated = current is not None and _rotated(path, current)
            if current is None:
                current = _open(path)
            while current is not None and (chunk := current.read(CHUNK_BYTES)):
                yield chunk
            if ending:
                return
            if rotated and current is not None:
                current.close()
                current = None
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), POLL_S)
    finally:
        if current is not None:
            current.close()
