"""What is left of a daemon that does not answer: its lock, and engines that outlived it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamactl_supervisor.config import Paths


def daemon_holds_lock(paths: Paths) -> bool:
    """Return whether a daemon lives in this runtime directory, answering or not."""
    try:
        fd = os.open(paths.daemon_lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def engine_pids(paths: Paths) -> list[int]:
    """Return the engines whose holders recorded them here and that still run."""
    records = (_read(record) for record in paths.runtime.glob("engine-*/holder.json"))
    return sorted(pid for pid, ticks in records if pid is not None and _start_ticks(pid) == ticks)


def _read(record: Path) -> tuple[int | None, int | None]:
    """Return pid and start of the engine in `record`, both None where there is none."""
    try:
        found = json.loads(record.read_bytes())
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        if found["boot_id"] != boot_id:
            return None, None
        return found["engine_pid"], found["engine_start_ticks"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def _start_ticks(pid: int) -> int | None:
    """Return the process's start in ticks since boot: field 22 of /proc/PID/stat."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[19])
