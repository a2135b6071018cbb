"""What is left of a daemon that does not answer: its lock, and processes that outlived it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamactl_cli import proc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamactl_supervisor.config import Paths

KILL_S = 5.0
"""How long a killed process may take to be gone."""


@dataclass(frozen=True)
class Remnant:
    """A process that lives on. `doubt` None: proven to be the one that its record names.

    `adoptable`: the saved state names it too, so the next daemon takes it over. `start_ticks` is
    its start; with a `doubt` it may be anybody.
    """

    pid: int
    start_ticks: int
    role: str
    instance_id: str
    adoptable: bool
    doubt: str | None
    holder_pid: int | None = None

    @property
    def age_s(self) -> float | None:
        """For how long it has run."""
        return proc.age_s(self.pid)


def daemon_holds_lock(paths: Paths) -> bool:
    """Return whether a daemon lives in this runtime directory, answering or not."""
    with daemon_lock(paths) as held:
        return held is False


@contextlib.contextmanager
def daemon_lock(paths: Paths) -> Iterator[bool | None]:
    """Keep every daemon from beginning; False where one lives, None where there never was one."""
    try:
        fd = os.open(paths.daemon_lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)


def engine_pids(paths: Paths) -> list[int]:
    """Return the engines whose holders recorded them here and that still run."""
    return sorted(found.pid for found in recorded(paths) if found.role == "engine")


def recorded(paths: Paths) -> list[Remnant]:
    """Return the living engines that their holders recorded, and holders that outlived theirs."""
    from llamactl_supervisor.client import state_holder

    named = None if state_holder(paths) is not None else saved(paths).get("instance_id")
    return [
        found
        for directory in sorted(paths.runtime.glob("engine-*"))
        for found in _recorded(directory, named)
    ]


def unrecorded(paths: Paths, known: set[int]) -> list[Remnant]:
    """Return engines of this runtime directory that no record names any more, or only the state.

    Anyone can have such a command line, so nothing is proven by it. What the state names while a
    daemon of another runtime directory has it is that daemon's, and left out.
    """
    from llamactl_supervisor.client import state_holder

    found: dict[int, Remnant] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        words = [] if pid in known else proc.command_line(pid)
        if "--instance-id" not in words[:-1]:
            continue
        name = words[words.index("--instance-id") + 1]
        socket = str(paths.engine_dir(name) / "engine.sock")
        ticks = proc.start_ticks(pid)
        if ticks is not None and any(word.endswith(socket) for word in words):
            doubt = "its holder's record is gone; only its command line names this directory"
            found[pid] = Remnant(pid, ticks, "engine", name, False, doubt)
    process = None if state_holder(paths) is not None else saved(paths).get("process")
    lost = process if isinstance(process, dict) else {}
    with contextlib.suppress(KeyError, TypeError):
        engine, name = lost["engine"], str(lost["instance_id"])
        pid, ticks = int(engine["pid"]), int(engine["start_ticks"])
        alive = engine["boot_id"] == proc.boot_id() and proc.start_ticks(pid) == ticks
        if alive and pid not in known:
            doubt = "the saved state names it, but its holder's record is gone"
            found[pid] = Remnant(pid, ticks, "engine", name, False, doubt)
    return list(found.values())


def end(remnant: Remnant, term_s: float) -> bool:
    """TERM it, KILL it after `term_s` seconds; return whether it is gone. Exactly it, or nobody.

    An engine's holder goes after it, once the log and the exit record are written; it is awaited.
    """
    assert remnant.doubt is None
    with _pidfd(remnant.pid) as fd, _pidfd(remnant.holder_pid) as holder_fd:
        # The proof comes after the pidfd is held: from here on it cannot be another process.
        if fd is None or proc.start_ticks(remnant.pid) != remnant.start_ticks:
            return True
        # A holder ignores TERM: it ends with its engine.
        for number, within_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, KILL_S)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
            if _gone(fd, within_s):
                return holder_fd is None or _gone(holder_fd, KILL_S)
        return False


def saved(paths: Paths) -> dict[str, Any]:
    """Return the saved state as it is; empty where there is none, or none that makes sense."""
    return _read(paths.state_file)


@contextlib.contextmanager
def _pidfd(pid: int | None) -> Iterator[int | None]:
    try:
        fd = None if pid is None else os.pidfd_open(pid)
    except ProcessLookupError:
        fd = None
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def _gone(fd: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def _recorded(directory: Path, named: object) -> Iterator[Remnant]:
    record = _read(directory / "holder.json")
    try:
        if record["boot_id"] != proc.boot_id():
            return
        found = [
            (role, int(record[f"{role}_pid"]), int(record[f"{role}_start_ticks"]))
            for role in ("engine", "holder")
            if record.get(f"{role}_pid") is not None
        ]
    except (KeyError, TypeError, ValueError):
        return
    name = directory.name.removeprefix("engine-")
    doubt = _open_to_others(directory)
    alive = [(role, pid, ticks) for role, pid, ticks in found if proc.start_ticks(pid) == ticks]
    if alive:
        role, pid, ticks = alive[0]  # its holder, if it comes second, ends with it
        holder = alive[1][1] if len(alive) > 1 else None
        adoptable = role == "engine" and named == name
        yield Remnant(pid, ticks, role, name, adoptable, doubt, holder)


def _open_to_others(directory: Path) -> str | None:
    """Return why a record in there may be anybody's; None where only we can have written it."""
    for place in (directory, directory.parent):
        try:
            found = place.stat()
        except OSError as exc:
            return f"{place}: {exc.strerror}"
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            return f"others may write in {place}: its record proves nothing"
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
