"""How short of memory the machine and our control groups are, as the kernel itself measures it."""

from __future__ import annotations

import contextlib
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def memory(proc: Path = _PROC, groups: Path = _GROUPS) -> float | None:
    """Return the percentage of the last ten seconds in which something waited for memory.

    The highest of the machine's and of each control group's (version 2) on the path to this
    process; None where the kernel does not measure it.
    """
    files = [proc / "pressure" / "memory"]
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                whole = groups / line.removeprefix("0::").lstrip("/")
                steps = [whole, *whole.parents]
                files += [each / "memory.pressure" for each in steps if each.is_relative_to(groups)]
    return max((found for file in files if (found := _some(file)) is not None), default=None)


def _some(file: Path) -> float | None:
    """Return `avg10` of the line `some avg10=0.00 avg60=...`."""
    try:
        for line in file.read_text().splitlines():
            kind, *averages = line.split()
            if kind == "some":
                return float(averages[0].removeprefix("avg10="))
    except (OSError, ValueError, IndexError):
        return None
    return None
