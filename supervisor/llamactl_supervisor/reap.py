"""What a daemon that is gone left behind, cleared away without another one.

An engine is ended only if it is proven ours and was meant to be stopped; one that is to go on
(after a crash of the daemon, after a hand-over) is left to the next daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import instances, locks, process, store
from llamactl_supervisor.errors import Code, error
from llamactl_supervisor.models import Intent
from llamactl_supervisor.process import Process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.config import Paths, Settings
    from llamactl_supervisor.events import EngineProcess

log = logging.getLogger("llamactl.reap")

GRACE_S_MAX = 15.0
"""Most of `stop_term_s` that is given here. All of it must end before the unit's TimeoutStopSec=,
which nobody extends for us."""
KILLED_S = 30.0
"""How long a killed engine may take to be gone: the kernel gives back what it held."""
MANAGER_ANSWER_S = 5.0


async def reap(paths: Paths, settings: Settings, stopping: bool) -> None:
    """Clear away what is dead, and end the engine if it was to be stopped.

    `stopping`: it was, even if the daemon did not live to record it. Raises `daemon_running` while
    there is one, `state_unreadable`, and `timed_out` for an engine that a KILL does not end.
    """
    paths.create()
    with locks.held(paths):
        saved, _ = store.load(paths.state_file)
        for name in list(instances.names(paths)):
            found = instances.read(paths, name) or instances.fence(paths, name)
            if found is None:
                continue
            if process.alive(found.engine):
                pid = found.engine.pid
                if name != saved.instance_id:
                    log.error("unproven engine pid=%d instance=%s: left alone", pid, name)
                    continue
                if saved.intent is Intent.UP and not stopping:
                    log.info("engine pid=%d is to go on: left to the next daemon", pid)
                    continue
                await _end(paths, settings, saved, found)
            instances.remove(paths, name)
        if not _listens(paths.control_socket):
            paths.control_socket.unlink(missing_ok=True)


async def _end(paths: Paths, settings: Settings, saved: store.Saved, found: EngineProcess) -> None:
    """Return when the engine and its holder are gone.

    The daemon records that the engine is to stop before it sends the TERM, so where that is
    recorded the TERM was sent; a second one would make llama-server exit in its handler.
    """
    pid, engine = found.engine.pid, Process.open(found.engine)
    if engine is not None:
        with contextlib.closing(engine):
            if saved.intent is Intent.UP:
                store.save(paths.state_file, saved.model_copy(update={"intent": Intent.DOWN}))
                engine.send(signal.SIGTERM)
            grace_s = min(settings.stop_term_s, GRACE_S_MAX)
            log.info("engine pid=%d was to be stopped: waiting %g s", pid, grace_s)
            if not await _gone(engine, grace_s):
                log.warning("engine pid=%d does not end: KILL", pid)
                engine.send(signal.SIGKILL)
                if not await _gone(engine, KILLED_S):
                    raise error(Code.TIMED_OUT, f"engine pid {pid} outlives a KILL")
    holder = None if found.holder is None else Process.open(found.holder)
    if holder is not None:
        with contextlib.closing(holder):
            await _gone(holder, settings.holder_exit_s)
    log.info("engine pid=%d is gone", pid)


async def _gone(process: Process, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.gone(), within_s)
        return True
    return False


def _listens(path: Path) -> bool:
    """Say whether somebody listens there. Not by connecting: that would start a daemon."""
    listening = 0x10000
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if fields[7:] == [str(path)] and int(fields[3], 16) & listening:
            return True
    return False


def stop_is_asked(unit: str, user: bool, env: Mapping[str, str]) -> bool:
    """Say whether `unit` is being stopped although its daemon failed, from its ExecStopPost=.

    A daemon that hung or was killed may not have recorded that it was to stop. Then only the
    manager knows that this is neither a restart nor a crash: by the job that it works on.
    """
    if env.get("SERVICE_RESULT", "success") == "success":
        return False
    command = ["systemctl", *(["--user"] if user else []), "list-jobs", "--plain", "--no-legend"]
    try:
        jobs = subprocess.run(
            command, capture_output=True, text=True, timeout=MANAGER_ANSWER_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as exc:
        log.warning("what systemd does with %s cannot be known: %s", unit, exc)
        return False
    return any(job.split()[1:3] == [unit, "stop"] for job in jobs.splitlines())
