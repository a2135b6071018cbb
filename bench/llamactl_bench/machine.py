"""What machine this is, who else is at work on it, and whether its numbers are to be trusted."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from llamactl_bench.cell import Machine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llamactl_bench.cell import Outcome

_CPUINFO = Path("/proc/cpuinfo")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
STEADY_GOVERNOR = "performance"
LOOK_S = 1.0
OTHERS_MAX = 0.1
"""Of the processors' time, before a number is doubted."""


def look() -> Machine:
    """Look at this machine for `LOOK_S` seconds."""
    return Machine(
        cpu=_cpu(),
        architecture=platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        kernel=f"{platform.system()} {platform.release()}",
        governor=_read(_GOVERNOR).strip() or None,
        load_average=os.getloadavg()[0],
        busy=psutil.cpu_percent(LOOK_S) / 100,
        swap_used_bytes=psutil.swap_memory().used,
    )


class Watch:
    """Tells our own processor time from that of others, from its making on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy_s, self._own_s, self._swapped = _busy_s(), _own_s(), _swapped_bytes()

    @property
    def took_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self._began

    def others(self) -> float:
        """Return the others' part of all processor time; our children must have been waited for."""
        foreign_s = _busy_s() - self._busy_s - (_own_s() - self._own_s)
        there_s = self.took_s * (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, foreign_s / there_s)) if there_s else 0.0

    def swapped_bytes(self) -> int:
        """Return what was written to swap."""
        return max(0, _swapped_bytes() - self._swapped)


def doubts(outcomes: Iterable[Outcome]) -> list[str]:
    """Return why the numbers are not to be trusted; nothing where they are."""
    found = []
    measured = [each for each in outcomes if not each.why_not]
    of_all = f"of {len(measured)} cells"
    busy = [each.machine.busy for each in measured if each.machine]
    in_use = [part for part in busy if part > OTHERS_MAX]
    if in_use:
        found.append(
            f"{max(in_use):.0%} of the processors was in use before the run that measured "
            f"{len(in_use)} {of_all}"
        )
    governors = {each.machine.governor for each in measured if each.machine}
    found += [
        f"the governor {governor} changes the processor's clock; {STEADY_GOVERNOR} would not"
        for governor in sorted(governors - {None, STEADY_GOVERNOR}, key=str)
    ]
    noisy = [each for each in measured if each.others > OTHERS_MAX]
    if noisy:
        worst = max(each.others for each in noisy)
        found.append(
            f"other programs took up to {worst:.0%} of the processors in {len(noisy)} {of_all}"
        )
    swapped = sum(each.swapped_bytes for each in measured)
    if swapped:
        found.append(f"{swapped / 2**20:.0f} MiB went to swap meanwhile")
    return found


def _cpu() -> str:
    for line in _read(_CPUINFO).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Hardware"):
            return value.strip()
    return "unknown processor"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _busy_s() -> float:
    times = psutil.cpu_times()
    # A guest's time is in `user` already; what the host takes of us is somebody else's work.
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def _own_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _swapped_bytes() -> int:
    return int(psutil.swap_memory().sout)
