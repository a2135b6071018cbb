"""The private directory of each engine process: its socket, and its holder's two records."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime
from signal import Signals
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from llamactl_supervisor.events import EngineProcess
from llamactl_supervisor.models import ExitRecord, ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llamactl_supervisor.paths import Paths

_PREFIX = "engine-"


class _HolderRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: str
    boot_id: str
    holder_pid: int
    holder_start_ticks: int
    engine_pid: int | None
    engine_start_ticks: int | None = None


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


def create(paths: Paths, instance_id: str) -> None:
    """Create the directory, 0700."""
    paths.engine_dir(instance_id).mkdir(mode=0o700)


def remove(paths: Paths, instance_id: str) -> None:
    """Remove the directory with the engine's socket; its process must be gone."""
    shutil.rmtree(paths.engine_dir(instance_id), ignore_errors=True)


def read(paths: Paths, instance_id: str) -> EngineProcess | None:
    """Return who holder.json says the engine is; None when no engine was ever released to run."""
    return _read(paths.engine_dir(instance_id))


def _read(directory: Path) -> EngineProcess | None:
    try:
        text = (directory / "holder.json").read_bytes()
        record = _HolderRecord.model_validate_json(text)
    except (OSError, ValidationError):
        return None
    if record.engine_pid is None or record.engine_start_ticks is None:
        return None
    boot = record.boot_id
    return EngineProcess(
        instance_id=record.instance_id,
        engine=ProcessIdentity(
            pid=record.engine_pid, start_ticks=record.engine_start_ticks, boot_id=boot
        ),
        holder=ProcessIdentity(
            pid=record.holder_pid, start_ticks=record.holder_start_ticks, boot_id=boot
        ),
    )


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
