"""What a daemon that is gone left behind, cleared away without another one.

An engine is ended only if it is proven ours and was meant to be stopped; one that is to go on
(after a crash of the daemon, after a hand-over) is left to the next daemon.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import instances, locks, procfs, store
from llamactl_supervisor.errors import Code, error
from llamactl_supervisor.models import Intent
from llamactl_supervisor.process import Process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.config import Paths, Settings
    from llamactl_supervisor.models import EngineProcess, ProcessIdentity
    from llamactl_supervisor.remains import Remnant

log = logging.getLogger("llamactl.reap")

GRACE_S_MAX = 15.0
"""Most of `stop_term_s` that is given here. All of it must end before the unit's TimeoutStopSec=,
which nobody extends for us."""
KILLED_S = 30.0
"""How long a killed engine may take to be gone: the kernel gives back what it held."""
KILLED_BY_HAND_S = 5.0
"""The same where a person waits for it."""
MANAGER_ANSWER_S = 5.0


@dataclass(frozen=True)
class Reaped:
    """What became of what was there."""

    ended: list[int] = field(default_factory=list)
    """The pids of engines that were to be stopped and are gone now."""
    left: list[int] = field(default_factory=list)
    """The pids of engines that go on: the next daemon's, or not proven ours."""
    removed: list[str] = field(default_factory=list)
    """The directories of engines that are gone, and the socket that nobody listens on."""


def reap(paths: Paths, settings: Settings, stopping: bool) -> Reaped:
    """Clear away what is dead, end the engine if it was to be stopped, and say what was done.

    `stopping`: it was, even if the daemon did not live to record it. Raises `daemon_running` while
    there is one, `state_unreadable`, and `timed_out` for an engine that a KILL does not end.
    """
    reaped = Reaped()
    paths.create()
    with locks.held(paths):
        saved, _ = store.load(paths.state_file)
        claimed = {each.instance_id: each for each in instances.claimed(paths)}
        for name in list(instances.names(paths)):
            found = instances.read(paths, name)
            if found is None and name in claimed:
                pid = claimed[name].engine.pid
                log.error("unproven engine pid=%d instance=%s: left alone", pid, name)
                reaped.left.append(pid)
                continue
            found = found or instances.fence(paths, name)
            if found is None:
                reaped.removed.append(str(paths.engine_dir(name)))
                continue
            if procfs.alive(found.engine):
                pid = found.engine.pid
                if name != saved.instance_id:
                    log.error("unproven engine pid=%d instance=%s: left alone", pid, name)
                    reaped.left.append(pid)
                    continue
                if saved.intent is Intent.UP and not stopping:
                    log.info("engine pid=%d is to go on: left to the next daemon", pid)
                    reaped.left.append(pid)
                    continue
                _end(paths, settings, saved, found)
                reaped.ended.append(pid)
            elif name == saved.instance_id and saved.intent is Intent.UP:
                if not stopping:
                    log.info("how engine pid=%d ended is left to the next daemon", found.engine.pid)
                    continue
                store.save(paths.state_file, saved.model_copy(update={"process": None}))
            instances.remove(paths, name)
            reaped.removed.append(str(paths.engine_dir(name)))
        if paths.control_socket.exists() and not _listens(paths.control_socket):
            paths.control_socket.unlink(missing_ok=True)
            reaped.removed.append(str(paths.control_socket))
    return reaped


def _end(paths: Paths, settings: Settings, saved: store.Saved, found: EngineProcess) -> None:
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
            if not engine.gone_within(grace_s):
                log.warning("engine pid=%d does not end: KILL", pid)
                engine.send(signal.SIGKILL)
                if not engine.gone_within(KILLED_S):
                    raise error(Code.TIMED_OUT, f"engine pid {pid} outlives a KILL")
    _gone(found.holder, settings.holder_exit_s)
    log.info("engine pid=%d is gone", pid)


def end(paths: Paths, remnant: Remnant, term_s: float) -> bool:
    """TERM it, KILL it after `term_s` seconds; return whether it is gone. Exactly it, or nobody.

    For a person who asks for it. An engine's holder goes after it, once the log and the exit record
    are written; it is awaited.
    """
    assert remnant.doubt is None
    instances.end_by_hand(paths, remnant.instance_id)
    process = Process.open(remnant.process)
    if process is None:
        return True
    with contextlib.closing(process):
        # A holder ignores TERM: it ends with its engine.
        for number, within_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, KILLED_BY_HAND_S)):
            process.send(number)
            if process.gone_within(within_s):
                return _gone(remnant.holder, KILLED_BY_HAND_S)
    return False


def _gone(identity: ProcessIdentity | None, within_s: float) -> bool:
    """Return whether the process, if there is one, is gone within so many seconds."""
    process = None if identity is None else Process.open(identity)
    if process is None:
        return True
    with contextlib.closing(process):
        process.send(signal.SIGCONT)  # it may be stopped, and has only to write how it ended
        return process.gone_within(within_s)


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
