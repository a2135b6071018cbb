"""How much memory is free: by the machine, and by every cgroup that a process is in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
MACHINE = "the machine"


@dataclass(frozen=True)
class Bound:
    """Bytes that may still be taken, and who says so."""

    name: str
    free_bytes: int


def bounds(
    pid: int | None = None, *, proc: Path = Path("/proc"), root: Path = CGROUPS
) -> list[Bound]:
    """Return the machine's bound and that of each cgroup above `pid` (None: this process).

    A cgroup's page cache can be taken back: it counts as free. Mapped weights are page cache too,
    and are needed; a bound that rests on them is optimistic by their size.
    """
    found = [Bound(MACHINE, _available(proc / "meminfo"))]
    for line in _lines(proc / ("self" if pid is None else str(pid)) / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _above(root, path, "memory.max", "memory.current", "inactive_file")
        elif controllers == "memory":
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            found += _above(root / "memory", path, limit, usage, "total_inactive_file")
    return found


def _above(root: Path, path: str, limit: str, usage: str, cache: str) -> list[Bound]:
    found = []
    for directory in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
        if not directory.is_relative_to(root):
            break
        most, used = _number(directory / limit), _number(directory / usage)
        if most is not None and used is not None:
            taken = used - _stat(directory / "memory.stat", cache)
            found.append(Bound(f"cgroup {directory}", max(0, most - taken)))
    return found


def _available(meminfo: Path) -> int:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _stat(path: Path, name: str) -> int:
    found = (line.split() for line in _lines(path))
    return next((int(value) for key, value in found if key == name), 0)


def _number(path: Path) -> int | None:
    """Return the number in the file; None for `max`, and where there is none."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
