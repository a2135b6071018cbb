"""What the kernel says of one process: whether it is still that one, its age, what it has done."""

from __future__ import annotations

import contextlib
import os
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor.models import ProcessIdentity
from llamactl_supervisor.progress import Activity

if TYPE_CHECKING:
    from collections.abc import Iterator


@cache
def boot_id() -> str:
    """Return the name of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def identify(pid: int) -> ProcessIdentity | None:
    """Return who `pid` is now; None for nobody, and for one that ended and waits to be reaped."""
    found = _stat(pid)
    if found is None:
        return None
    return ProcessIdentity(pid=pid, start_ticks=int(found[19]), boot_id=boot_id())


def alive(identity: ProcessIdentity) -> bool:
    """Say whether exactly this process still runs."""
    return identify(identity.pid) == identity


def activity(identity: ProcessIdentity) -> Activity | None:
    """Return what the process has done so far; None once it is gone."""
    found = _stat(identity.pid)
    if found is None or int(found[19]) != identity.start_ticks:
        return None
    ticks = int(found[11]) + int(found[12])
    stopped = found[0] in {b"T", b"t"}
    return Activity(ticks / os.sysconf("SC_CLK_TCK"), _disk_bytes(identity.pid), is_stopped=stopped)


def uptime_s(identity: ProcessIdentity) -> float:
    """Return the seconds since the process began. No clock that is set moves it."""
    began_s = identity.start_ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)


def age_s(pid: int) -> float | None:
    """Return for how many seconds whoever is `pid` now has run; None for nobody."""
    found = identify(pid)
    return None if found is None else round(uptime_s(found), 1)


def command_line(pid: int) -> list[str]:
    """Return its arguments; none where they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in text.split(b"\0")[:-1]]


def of_this_user() -> Iterator[tuple[ProcessIdentity, list[str]]]:
    """Yield every process of this user with its arguments."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry.stat().st_uid != os.geteuid():
                continue
            words = command_line(int(entry.name))
            if (found := identify(int(entry.name))) is not None:
                yield found, words


def _stat(pid: int) -> list[bytes] | None:
    """Return /proc/PID/stat from the state on, its third field; None for who is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = stat.rpartition(b")")[2].split()
    return None if found[0] in {b"Z", b"X"} else found


def _disk_bytes(pid: int) -> int:
    """Return what was read from and written to disks; 0 where the kernel does not tell us."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]) + int(counts["write_bytes"])
