"""How much host memory there is for an engine: the system's, or what a control group leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_SYSTEM = "the system's available memory"
_UNLIMITED = 2**60
"""From here on a limit of a first version group is none."""
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("", "memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True)
class Available:
    """Bytes that can be had, and what they are bounded by."""

    n_bytes: int
    limit: str


def available(
    ends: int | None = None,
    *,
    to: int | None = None,
    proc: Path = _PROC,
    groups: Path = _GROUPS,
) -> Available | None:
    """Return what an engine can take, once the process `ends` is gone; None: it is not known.

    That is the smaller of what the system has and what each memory limit leaves on the path of
    control groups to the process `to` (None: this one). A group counts file pages that it could
    give back as used; mapped weights are such pages, and are needed: where a limit rests on them
    the answer is too high by their size.
    """
    given_back = 0 if ends is None else _anonymous(proc / str(ends))
    found = [_left_of_system(proc)]
    for line in _read(proc / ("self" if to is None else str(to)) / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found += [_left_of_group(groups, step, *_V2) for step in _steps(path)]
        elif "memory" in controllers.split(","):
            found += [_left_of_group(groups, step, *_V1) for step in _steps(path)]
    least = min((each for each in found if each is not None), key=_bytes, default=None)
    return None if least is None else Available(least.n_bytes + given_back, least.limit)


def _bytes(found: Available) -> int:
    return found.n_bytes


def _steps(path: str) -> list[str]:
    """Return the groups from the root on; within a container the root is the own one."""
    whole = Path("/") / path.lstrip("/")
    return [str(step).lstrip("/") for step in (*reversed(whole.parents), whole)]


def _left_of_system(proc: Path) -> Available | None:
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and (kib := rest.split()) and kib[0].isdigit():
            return Available(int(kib[0]) * 1024, _SYSTEM)
    return None


def _left_of_group(
    groups: Path, path: str, where: str, most: str, used: str, idle: str
) -> Available | None:
    directory = groups / where / path
    limit, current = _number(directory / most), _number(directory / used)
    if limit is None or limit >= _UNLIMITED or current is None:
        return None
    reclaimable = 0
    for line in _read(directory / "memory.stat").splitlines():
        name, _, rest = line.partition(" ")
        if name == idle and rest.strip().isdigit():
            reclaimable = int(rest)
    left = max(0, limit - max(0, current - reclaimable))
    return Available(left, f"the memory limit of {limit} bytes of control group /{path}")


def _anonymous(process: Path) -> int:
    """Return the bytes of a process that are of no file: they are free once it is gone."""
    for line in _read(process / "status").splitlines():
        name, _, rest = line.partition(":")
        if name == "RssAnon" and (kib := rest.split()) and kib[0].isdigit():
            return int(kib[0]) * 1024
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
