"""The ledger: one JSON line for every weight load and for every load that was avoided."""

from __future__ import annotations

import os
from datetime import datetime  # noqa: TC003 - pydantic reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from llamactl_supervisor.models import Geometry, Override, Wire

if TYPE_CHECKING:
    from pathlib import Path


class LoadLine(Wire):
    """Weights were loaded, or (`loaded` false) a load was tried and failed after `load_s`.

    `load_s` null: nobody saw it. `dropped`: the live geometry that a crash soon after it has put
    in doubt; the load is of the one before.
    """

    v: Literal[1] = 1
    kind: Literal["load"] = "load"
    at: datetime
    generation: int
    cause: str
    by: str
    loaded: bool
    load_s: float | None
    model: str
    model_bytes: int | None
    n_ctx: int
    n_seq: int
    dropped: Override | None = None


class AvoidedLine(Wire):
    """A reconfigure took the place of a relaunch."""

    v: Literal[1] = 1
    kind: Literal["avoided"] = "avoided"
    at: datetime
    by: str
    pause_ms: float
    tokens_held: int
    previous: Geometry
    geometry: Geometry


_LINE: TypeAdapter[LoadLine | AvoidedLine] = TypeAdapter(
    Annotated[LoadLine | AvoidedLine, Field(discriminator="kind")]
)


class Totals(Wire):
    """Sums over the whole ledger."""

    weight_loads: int = 0
    loads_avoided: int = 0


def append(path: Path, line: LoadLine | AvoidedLine) -> None:
    """Append durably. Raises OSError: the engine goes on, the caller counts what is missing."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The new line comes first if the last writer died in the middle of one.
        data = line.model_dump_json().encode() + b"\n"
        os.write(fd, data if _ends_whole(path) else b"\n" + data)
        os.fsync(fd)
    finally:
        os.close(fd)


def totals(path: Path) -> Totals:
    """Count the ledger; a line that was torn by a crash counts for nothing."""
    loads = avoided = 0
    try:
        with path.open("rb") as lines:
            for text in lines:
                match _parse(text):
                    case LoadLine(loaded=True):
                        loads += 1
                    case AvoidedLine():
                        avoided += 1
    except FileNotFoundError:
        pass
    return Totals(weight_loads=loads, loads_avoided=avoided)


def _parse(text: bytes) -> LoadLine | AvoidedLine | None:
    try:
        return _LINE.validate_json(text)
    except ValidationError:
        return None


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        return size == 0 or file.read(1) == b"\n"
