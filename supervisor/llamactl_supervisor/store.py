"""What proves one daemon to the next: state.json."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import ValidationError

from llamactl_supervisor.errors import Code, error
from llamactl_supervisor.models import (
    After,
    EngineConfig,
    EngineProcess,
    ExitRecord,
    Intent,
    LoadCause,
    Override,
    Problem,
    Receipt,
    UpRequest,
    Wire,
)
from llamactl_supervisor.spec import EngineSpec  # noqa: TC001 - pydantic needs it

if TYPE_CHECKING:
    from pathlib import Path


_Shape = TypeVar("_Shape", bound=Wire)


class Accepted(Wire):
    """An apply that has not come to its end; see `snapshot.Unended`."""

    operation: str
    request: UpRequest
    spec: EngineSpec
    by: str
    is_sent: bool


class Saved(Wire):
    """The durable part of a snapshot. `instance_id` names an engine that may have been spawned.

    `loads_recorded` and `last_reconfigure` are what the ledger has of it, so that what happens
    while no daemon lives is found by the next; `change_by` asked for the change of the geometry
    that is under way. `unproven` are engines that may be ours and cannot be proven it, each until
    that very process is gone. `failed` is why the engine was given up, `stopping` what is to follow
    its end once its TERM was decided: what it held is in files then. `cause` is why it was loaded
    last; while that load is under way or to come, `load_by` is who asked for it, and `load_began`
    when it began, on the clock of the boot (monotonic). `applies` have been accepted and have not
    come to their end.
    """

    version: Literal[1] = 1
    intent: Intent = Intent.DOWN
    generation: int = 0
    desired: UpRequest | None = None
    running: UpRequest | None = None
    running_spec: EngineSpec | None = None
    override: Override | None = None
    baseline: EngineConfig | None = None
    instance_id: str | None = None
    process: EngineProcess | None = None
    loads_recorded: int = 0
    last_reconfigure: Receipt | None = None
    on_trial: bool = False
    last_good: Override | None = None
    unproven: tuple[EngineProcess, ...] = ()
    crashes: int = 0
    relapses: int = 0
    failed: Problem | None = None
    cause: LoadCause = LoadCause.UP
    stopping: After | None = None
    last_exit: ExitRecord | None = None
    change_by: str | None = None
    load_by: str | None = None
    load_began: float = 0.0
    applies: tuple[Accepted, ...] = ()


def load(path: Path) -> tuple[Saved, Path | None]:
    """Return what was saved; a file that makes no sense is set aside, and its new name returned.

    Raises `state_unreadable` when the file cannot be read at all: going on without it could start
    a second engine beside one that it names.
    """
    return read(path, Saved)


def read(path: Path, shape: type[_Shape]) -> tuple[_Shape, Path | None]:
    """Read a file of any such shape; one that is not there is an empty one. As `load`."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return shape(), None
    except OSError as exc:
        raise error(Code.STATE_UNREADABLE, f"{path} cannot be read: {exc.strerror}") from exc
    try:
        return shape.model_validate_json(text), None
    except ValidationError:
        aside = _unused(path.with_name(f"{path.name}.broken-{os.getpid()}"))
        path.replace(aside)
        return shape(), aside


def peek(path: Path) -> Saved:
    """Return what was saved and leave it as it is; what cannot be read counts as nothing saved."""
    return peek_at(path, Saved)


def peek_at(path: Path, shape: type[_Shape]) -> _Shape:
    """Return a file of any such shape likewise."""
    try:
        return shape.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return shape()


def save(path: Path, saved: Wire) -> None:
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


def _unused(path: Path) -> Path:
    """Return the path, or one like it: what was set aside before is not replaced."""
    number, free = 1, path
    while free.exists():
        number, free = number + 1, path.with_name(f"{path.name}-{number}")
    return free
