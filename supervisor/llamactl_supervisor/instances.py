"""The private directory of each engine process: its socket, and its holder's two records."""

from __future__ import annotations

import contextlib
import os
import shutil
from datetime import UTC, datetime
from signal import Signals
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from llamactl_supervisor import procfs
from llamactl_supervisor.models import (
    EngineProcess,
    ExitRecord,
    Override,
    ProcessIdentity,
    UpRequest,
    Wire,
)
from llamactl_supervisor.spec import EngineSpec  # noqa: TC001 - pydantic needs it

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llamactl_supervisor.paths import Paths

_PREFIX = "engine-"
_OPTION = "--instance-id"


class Asked(Wire):
    """What the engine of a directory was asked to be: it can be known without the saved state."""

    generation: int
    request: UpRequest
    override: Override | None
    spec: EngineSpec | None = None


class HolderRecord(BaseModel):
    """What a holder wrote of itself and of the engine, once it has released that to run."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: str
    boot_id: str
    holder_pid: int
    holder_start_ticks: int
    engine_pid: int | None
    engine_start_ticks: int | None = None

    @property
    def holder(self) -> ProcessIdentity:
        """Who the holder is."""
        return self._identity(self.holder_pid, self.holder_start_ticks)

    @property
    def engine(self) -> ProcessIdentity | None:
        """Who the engine is; None when none was released to run."""
        if self.engine_pid is None or self.engine_start_ticks is None:
            return None
        return self._identity(self.engine_pid, self.engine_start_ticks)

    def _identity(self, pid: int, start_ticks: int) -> ProcessIdentity:
        return ProcessIdentity(pid=pid, start_ticks=start_ticks, boot_id=self.boot_id)


class _Pulse(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    dropped_bytes: int = 0


class _ExitFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    exec_errno: int | None
    exit_code: int | None
    signal: int | None
    ended_at: datetime
    cpu_s: float
    max_rss_bytes: int
    last_lines: tuple[str, ...]
    dropped_bytes: int


def create(paths: Paths, instance_id: str, asked: Asked) -> None:
    """Create the directory, 0700, with what its engine is asked to be."""
    directory = paths.engine_dir(instance_id)
    directory.mkdir(mode=0o700)
    fd = os.open(
        directory / "asked.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(fd, "w") as out:
        out.write(asked.model_dump_json())


def began(paths: Paths, instance_id: str) -> datetime | None:
    """Return when the engine was ordered, which is before its first line; None: it is gone."""
    try:
        ordered = (paths.engine_dir(instance_id) / "asked.json").stat()
    except OSError:
        return None
    return datetime.fromtimestamp(ordered.st_mtime, UTC)


def asked(paths: Paths, instance_id: str) -> Asked | None:
    """Return what the engine was asked to be; None where nothing sensible is said of it."""
    try:
        text = (paths.engine_dir(instance_id) / "asked.json").read_bytes()
        return Asked.model_validate_json(text)
    except (OSError, ValidationError):
        return None


def remove(paths: Paths, instance_id: str) -> None:
    """Remove the directory with the engine's socket; its process must be gone."""
    shutil.rmtree(paths.engine_dir(instance_id), ignore_errors=True)


def read(paths: Paths, instance_id: str) -> EngineProcess | None:
    """Return who holder.json says the engine is; None when no engine was ever released to run."""
    return _read(paths.engine_dir(instance_id))


def record(paths: Paths, instance_id: str) -> HolderRecord | None:
    """Return what holder.json says; None where it says nothing sensible."""
    return _record(paths.engine_dir(instance_id))


def _record(directory: Path) -> HolderRecord | None:
    try:
        return HolderRecord.model_validate_json((directory / "holder.json").read_bytes())
    except (OSError, ValidationError):
        return None


def _read(directory: Path) -> EngineProcess | None:
    found = _record(directory)
    if found is None or found.engine is None:
        return None
    return EngineProcess(instance_id=found.instance_id, engine=found.engine, holder=found.holder)


def fence(paths: Paths, instance_id: str) -> EngineProcess | None:
    """Make sure that no engine comes of this directory any more, and remove it.

    A holder whose daemon died in the middle of a start may still be on its way. It cannot pass
    without writing its record here first, so moving the directory away stops it. Returns the
    engine if it was released before that; then everything is as it was.
    """
    directory = paths.engine_dir(instance_id)
    aside = directory.with_name(f"fenced-{instance_id}")
    directory.rename(aside)
    released = _read(aside)
    if released is None:
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.rename(directory)
    return released


def claimed(paths: Paths) -> list[EngineProcess]:
    """Return this user's processes that have an engine's socket here in their command line.

    Anyone can have such a command line, so nothing is proven by it; but where the records of a
    living engine are lost, it is all that is left of it.
    """
    found: list[EngineProcess] = []
    for identity, words in procfs.of_this_user():
        if _OPTION not in words[:-1]:
            continue
        name = words[words.index(_OPTION) + 1]
        socket = str(paths.engine_dir(name) / "engine.sock")
        if any(word.endswith(socket) for word in words):
            found.append(EngineProcess(instance_id=name, engine=identity, holder=None))
    return found


def end_by_hand(paths: Paths, instance_id: str) -> None:
    """Say that a person has this engine ended, so that no daemon takes it for a crash."""
    with contextlib.suppress(OSError):
        _ended(paths, instance_id).touch(mode=0o600)


def ended_by_hand(paths: Paths, instance_id: str) -> bool:
    """Say whether a person had this engine ended, with `llamactl orphans --end`."""
    return _ended(paths, instance_id).exists()


def _ended(paths: Paths, instance_id: str) -> Path:
    return paths.engine_dir(instance_id) / "ended"


def names(paths: Paths) -> Iterator[str]:
    """Yield the instance id of every directory there is."""
    for directory in sorted(paths.runtime.glob(f"{_PREFIX}*")):
        yield directory.name.removeprefix(_PREFIX)


def pulse(paths: Paths, instance_id: str) -> int:
    """Return a number that moves while the engine writes to its output."""
    try:
        return (paths.engine_dir(instance_id) / "pulse").stat().st_mtime_ns
    except OSError:
        return 0


def dropped_bytes(paths: Paths, instance_id: str) -> int:
    """Return how much of the engine's output is in no log so far, for want of a disk."""
    try:
        text = (paths.engine_dir(instance_id) / "pulse").read_bytes()
        return _Pulse.model_validate_json(text).dropped_bytes
    except (OSError, ValidationError):
        return 0


def exit_record(paths: Paths, instance_id: str) -> ExitRecord:
    """Return how the engine ended; without its holder's word the status is lost, and says so."""
    path = paths.engine_dir(instance_id) / "exit.json"
    try:
        found = _ExitFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        summary = "ended with an unknown status (its holder left no record)"
        return ExitRecord(summary=summary, at=datetime.now(UTC))
    return ExitRecord(
        summary=_summary(found),
        at=found.ended_at,
        exit_code=found.exit_code,
        signal=found.signal,
        exec_errno=found.exec_errno,
        cpu_s=found.cpu_s,
        max_rss_bytes=found.max_rss_bytes,
        dropped_bytes=found.dropped_bytes,
        last_lines=found.last_lines,
    )


def _summary(found: _ExitFile) -> str:
    if found.exec_errno is not None:
        return f"could not be run: {os.strerror(found.exec_errno)}"
    if found.signal is not None:
        names = {number.value: f" ({number.name})" for number in Signals}
        return f"was ended by signal {found.signal}{names.get(found.signal, '')}"
    return f"exited with status {found.exit_code}"
