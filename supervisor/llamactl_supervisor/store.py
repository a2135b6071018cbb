"""What proves one daemon to the next: state.json, and the lock that only one of them holds."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from llamactl_supervisor.errors import Code, error
from llamactl_supervisor.events import EngineProcess  # noqa: TC001 - pydantic needs it
from llamactl_supervisor.models import (
    EngineConfig,
    Intent,
    Override,
    Receipt,
    UpRequest,
    Wire,
)

if TYPE_CHECKING:
    from pathlib import Path


class Saved(Wire):
    """The durable part of a snapshot. `instance_id` names an engine that may have been spawned.

    `loads_recorded` and `last_reconfigure` are what the ledger has of it, so that what happens
    while no daemon lives is found by the next. `last_good` counts only `on_trial`.
    """

    version: Literal[1] = 1
    intent: Intent = Intent.DOWN
    generation: int = 0
    desired: UpRequest | None = None
    running: UpRequest | None = None
    override: Override | None = None
    baseline: EngineConfig | None = None
    instance_id: str | None = None
    process: EngineProcess | None = None
    loads_recorded: int = 0
    last_reconfigure: Receipt | None = None
    on_trial: bool = False
    last_good: Override | None = None


def load(path: Path) -> tuple[Saved, Path | None]:
    """Return what was saved; a file that makes no sense is set aside, and its new name returned.

    Raises `state_unreadable` when the file cannot be read at all: going on without it could start
    a second engine beside one that it names.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Saved(), None
    except OSError as exc:
        raise error(Code.STATE_UNREADABLE, f"{path} cannot be read: {exc.strerror}") from exc
    try:
        return Saved.model_validate_json(text), None
    except ValidationError:
        aside = path.with_name(f"{path.name}.broken-{os.getpid()}")
        path.replace(aside)
        return Saved(), aside


def save(path: Path, saved: Saved) -> None:
    """Replace the file durably, 0600: after a crash it holds the old state or the new one.

    Raises `state_unwritable`.
    """
    new = path.with_name(path.name + ".new")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as out:
            out.write(saved.model_dump_json(indent=1).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())
        new.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as exc:
        raise error(
            Code.STATE_UNWRITABLE,
            f"{path} cannot be written: {exc.strerror}",
            hint="free space or fix permissions; until then no engine is started",
        ) from exc


def holder(path: Path) -> int | None:
    """Return the pid of the daemon that holds the lock; None where none does.

    Only for whoever knows that the daemon is past its beginning: one that begins right now may
    take this look for another daemon.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).strip()
        return int(pid) if pid.isdigit() else None
    else:
        return None
    finally:
        os.close(fd)


def lock(path: Path) -> int:
    """Take the daemon's lock for as long as the returned descriptor lives, or raise.

    The lock is the kernel's, so it ends with its daemon however that ends. The file holds the
    daemon's pid, for people.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise error(
            Code.DAEMON_RUNNING,
            f"a daemon (pid {pid}) already runs for {path.parent}",
            hint="use it, or end it with `llamactl down`",
            details={"pid": pid},
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
