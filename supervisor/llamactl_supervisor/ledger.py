"""The ledger: one JSON line for every weight load and for every load that was avoided."""

from __future__ import annotations

import errno
import os
from collections import deque
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from llamactl_supervisor.errors import Code, error
from llamactl_supervisor.models import AvoidedLine, Ledger, LedgerLine, LoadLine, Totals

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

RECENT_BYTES = 65536

_LINE: TypeAdapter[LedgerLine] = TypeAdapter(LedgerLine)


def append(path: Path, line: LedgerLine) -> None:
    """Append durably. Raises OSError: the engine goes on, the caller counts what is missing."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The new line comes first if the last writer died in the middle of one.
        data = line.model_dump_json().encode() + b"\n"
        data = data if _ends_whole(path) else b"\n" + data
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path, *, since: datetime | None = None, limit: int | None = None) -> Ledger:
    """Return the newest `limit` lines that are not older than `since`, and the sums over all.

    A line that makes no sense is only counted as such. Raises `state_unreadable`.
    """
    lines: deque[LedgerLine] = deque(maxlen=limit)
    loads = avoided = unreadable = 0
    try:
        with path.open("rb") as texts:
            for text in texts:
                line = _parse(text)
                unreadable += line is None and bool(text.strip())
                loads += isinstance(line, LoadLine) and line.loaded
                avoided += isinstance(line, AvoidedLine)
                if line is not None and (since is None or line.at >= since):
                    lines.append(line)
    except FileNotFoundError:
        pass
    except OSError as exc:
        raise error(
            Code.STATE_UNREADABLE, f"the ledger {path} cannot be read: {exc.strerror or exc}"
        ) from exc
    totals = Totals(weight_loads=loads, loads_avoided=avoided)
    return Ledger(lines=tuple(lines), totals=totals, unreadable=unreadable)


def recent(path: Path, count: int) -> list[LedgerLine]:
    """Return at most the last `count` lines, of the file's last 64 KiB: however long it is."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - RECENT_BYTES))
            texts = file.read().split(b"\n")
    except OSError:
        return []
    lines = (_parse(text) for text in texts)
    return [line for line in lines if line is not None][-count:]


def _parse(text: bytes) -> LedgerLine | None:
    try:
        return _LINE.validate_json(text)
    except ValidationError:
        return None


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        return size == 0 or file.read(1) == b"\n"
