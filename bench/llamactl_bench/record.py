"""What was finished, a line for each cell; nothing that was measured is thrown away.

A cell that is measured anew gets a line more, and the last one counts: there is no moment at which
an interrupt or a full disk could cost what was there before.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from typing import TYPE_CHECKING, Any

from llamactl_supervisor.errors import RefusedError
from pydantic import BaseModel, ConfigDict, ValidationError

from llamactl_bench.cell import Cell, Outcome  # noqa: TC001 (pydantic reads it)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BENCH_RUNNING = "bench_running"


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    conditions: str
    outcome: Outcome


class Record:
    """One file; nobody else measures while it is open.

    Raises `bench_running` where somebody does. `finished` is what was found in each cell under the
    same conditions, by whichever run came last. `unreadable` counts lines that make no sense, such
    as one that a full disk cut short: they are left out and measured again.
    """

    def __init__(self, path: Path, conditions: str) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
        try:
            self._lock(path)
            self.path, self._conditions = path, conditions
            self.finished: dict[Cell, Outcome] = {}
            self.unreadable = self.n_lost = 0
            self.why_lost = ""
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedError(
                BENCH_RUNNING,
                f"another `llamactl bench` is measuring: it holds {path}",
                hint="two at once would measure each other; wait for it, or end it",
            ) from None

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        self._gap = b"\n" if content and not content.endswith(b"\n") else b""
        for text in content.splitlines():
            try:
                line = _Line.model_validate_json(text)
            except ValidationError:
                self.unreadable += bool(text.strip())
                continue
            found = line.outcome
            if line.conditions == self._conditions and not (
                found.why_not and found.cell in self.finished
            ):
                self.finished[found.cell] = found

    def add(self, outcome: Outcome) -> None:
        """Note a cell; it is on the disk when this returns, or among `n_lost`."""
        line = _Line(conditions=self._conditions, outcome=outcome)
        content = self._gap + line.model_dump_json().encode() + b"\n"
        n_before = os.fstat(self._file.fileno()).st_size
        try:
            while content:
                content = content[self._file.write(content) :]
            os.fsync(self._file)
            self._gap = b""
        except OSError as exc:
            self._file.truncate(n_before)
            self.n_lost += 1
            self.why_lost = exc.strerror or str(exc)

    def close(self) -> None:
        """Let others measure."""
        self._file.close()


def conditions(programs: Mapping[str, Path], model: Path, cpu: str) -> dict[str, Any]:
    """Return what has to be the same for cells of two runs to stand in one table."""
    found = model.stat()
    return {
        "programs": {name: _sha256(path) for name, path in programs.items()},
        "model": [str(model.resolve()), found.st_size, found.st_mtime_ns],
        "cpu": cpu,
    }


def digest(conditions: Mapping[str, Any]) -> str:
    """Return a short name of them."""
    return hashlib.sha256(repr(sorted(conditions.items())).encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
