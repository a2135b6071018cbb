"""Processes by identity: proven before they are signalled, watched until they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from llamactl_supervisor.models import ProcessIdentity
from llamactl_supervisor.progress import Activity

if TYPE_CHECKING:
    from collections.abc import Mapping

HOLDER = Path(__file__).with_name("holder.py")


@cache
def boot_id() -> str:
    """Return the name of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def identify(pid: int) -> ProcessIdentity | None:
    """Return who `pid` is now; None for nobody, and for one that ended and waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *numbers = stat.rpartition(b")")[2].split()
    if state in {b"Z", b"X"}:
        return None
    return ProcessIdentity(pid=pid, start_ticks=int(numbers[18]), boot_id=boot_id())


def activity(identity: ProcessIdentity) -> Activity | None:
    """Return what the process has done so far; None once it is gone."""
    try:
        stat = Path(f"/proc/{identity.pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *numbers = stat.rpartition(b")")[2].split()
    if int(numbers[18]) != identity.start_ticks or state in {b"Z", b"X"}:
        return None
    ticks = int(numbers[10]) + int(numbers[11])
    stopped = state in {b"T", b"t"}
    return Activity(ticks / os.sysconf("SC_CLK_TCK"), _disk_bytes(identity.pid), is_stopped=stopped)


def _disk_bytes(pid: int) -> int:
    """Return what was read from and written to disks; 0 where the kernel does not tell us."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]) + int(counts["write_bytes"])


def uptime_s(identity: ProcessIdentity) -> float:
    """Return the seconds since the process began. No clock that is set moves it."""
    began_s = identity.start_ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)


class Process:
    """One living process, held by a pidfd: it cannot be mistaken for a later one of that pid."""

    def __init__(self, identity: ProcessIdentity, pidfd: int) -> None:
        self.identity = identity
        self._pidfd = pidfd

    @classmethod
    def open(cls, identity: ProcessIdentity) -> Self | None:
        """Return the process, or None when it is gone. The proof comes after the pidfd is held."""
        try:
            pidfd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return None
        if identify(identity.pid) == identity:
            return cls(identity, pidfd)
        os.close(pidfd)
        return None

    def close(self) -> None:
        """Let go of the process; it lives on."""
        os.close(self._pidfd)

    def send(self, number: signal.Signals) -> None:
        """Signal it. One that has just ended is left alone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    async def gone(self) -> None:
        """Return once the process has ended. One waiter at a time."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._pidfd)


def alive(identity: ProcessIdentity) -> bool:
    """Say whether exactly this process still runs."""
    return identify(identity.pid) == identity


def send(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal exactly this process; False when it is gone and nothing was signalled."""
    process = Process.open(identity)
    if process is None:
        return False
    try:
        process.send(number)
    finally:
        process.close()
    return True


def start_holder(order: Mapping[str, Any]) -> tuple[subprocess.Popen[bytes], bytes]:
    """Start a holder; return it and its answer once it has tried to run the engine.

    An empty answer is good or the holder's death (holder.json tells), otherwise it is the errno of
    exec. The caller reaps the holder. Blocks for as long as a fork: call in a thread.
    """
    holder = subprocess.Popen(
        [sys.executable, "-I", "-S", str(HOLDER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with contextlib.suppress(BrokenPipeError), holder.stdin:
        holder.stdin.write(json.dumps(order).encode())
    with holder.stdout:
        return holder, holder.stdout.read()
