"""What is in a file, told by its size and samples: touched, moved or copied it is the same.

Every function here reads; call it in a thread.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, LlamactlError, error

if TYPE_CHECKING:
    from pathlib import Path

WHOLE_BYTES_MAX = 32 * 2**20
"""A file up to this is read whole."""
HEAD_BYTES = 16 * 2**20
"""Of a larger one, this much of its start: a GGUF's metadata, with room for a large vocabulary."""
BLOCKS = 256
"""And so many blocks at even distances, from behind that to the end."""
BLOCK_BYTES = 64 * 2**10
PARTS_MAX = 1000
"""Most parts of one model."""
KNOWN_MAX = 512
"""Fingerprints kept."""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")

_known: dict[tuple[int, ...], str] = {}


def of(path: Path) -> str:
    """Return the fingerprint of the file; of a model in parts, of all of them.

    Raises `no_file` where there is none or a part is missing, and for what is no regular file;
    `no_access` where it cannot be read or is written to meanwhile.
    """
    found = [_of_one(part) for part in parts(path)]
    return found[0] if len(found) == 1 else hashlib.sha256("\n".join(found).encode()).hexdigest()


def named(value: str, cwd: Path) -> str | None:
    """Return what the files hold that an option's value names; None where it names none.

    That is one file, or a list with commas, and each may have a number behind it (`a.gguf:0.5`).
    Raises what `of` raises, but for a name of nothing.
    """
    whole = _there(cwd, value)
    if whole is not None:
        return of(whole)
    told, any_file = [], False
    for part in value.split(","):
        path, colon, scale = part.partition(":")
        file = _there(cwd, path)
        any_file |= file is not None
        told.append(part if file is None else of(file) + colon + scale)
    return ",".join(told) if any_file else None


def missing(value: str, cwd: Path) -> str | None:
    """Return the first name in an option's value (see `named`) that leads nowhere; None: all do."""
    for part in () if _leads(cwd, value) else value.split(","):
        path = part.partition(":")[0]
        if not (_leads(cwd, part) or _leads(cwd, path)):
            return path
    return None


def _leads(cwd: Path, name: str) -> bool:
    try:
        return (cwd / name).exists()
    except (OSError, ValueError):
        return False


def _there(cwd: Path, name: str) -> Path | None:
    try:
        return path if name and (path := cwd / name).is_file() else None
    except (OSError, ValueError):
        return None


def parts(path: Path) -> list[Path]:
    """Return the files of a model: itself, or every part as its name says."""
    name = _PART.fullmatch(path.name)
    if name is None or not 1 < int(name["count"]) <= PARTS_MAX:
        return [path]
    count = name["count"]
    return [
        path.with_name(f"{name['stem']}-{number:05}-of-{count}.gguf")
        for number in range(1, int(count) + 1)
    ]


def _of_one(path: Path) -> str:
    try:
        # Not blocking: what was a file when it was asked for may be a pipe now.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _no_file(path, "there is no file") from None
    except OSError as exc:
        raise _no_access(path, exc.strerror or str(exc)) from exc
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            raise _no_file(path, "there is no regular file")
        key = _key(before)
        if key not in _known:
            found = _digest(fd, before.st_size)
            if _key(os.fstat(fd)) != key:
                raise _no_access(path, "it was written to while it was read")
            while len(_known) >= KNOWN_MAX:
                _known.pop(next(iter(_known)), None)
            _known[key] = found
        return _known[key]
    except OSError as exc:
        raise _no_access(path, exc.strerror or str(exc)) from exc
    finally:
        os.close(fd)


def _digest(fd: int, size: int) -> str:
    hashed = hashlib.sha256(f"{size}\n".encode())
    head = size if size <= WHOLE_BYTES_MAX else HEAD_BYTES
    for at in range(0, head, 2**20):
        hashed.update(os.pread(fd, min(2**20, head - at), at))
    if head < size:
        span = size - head - BLOCK_BYTES
        for number in range(BLOCKS):
            at = head + span * number // (BLOCKS - 1)
            hashed.update(os.pread(fd, BLOCK_BYTES, at))
    return hashed.hexdigest()


def _key(found: os.stat_result) -> tuple[int, ...]:
    """Return what cannot stay the same when the content changes."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _no_file(path: Path, what: str) -> LlamactlError:
    return error(Code.NO_FILE, f"{what} {path}", details={"file": str(path)})


def _no_access(path: Path, why: str) -> LlamactlError:
    return error(Code.NO_ACCESS, f"{path} cannot be read: {why}", details={"file": str(path)})
