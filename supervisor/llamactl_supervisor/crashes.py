"""Crash records: a file for each end of the engine that nobody had asked for, the newest kept."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Literal

from llamactl_supervisor.models import ExitRecord, Geometry, Override, Wire

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from llamactl_supervisor import events as ev

KEPT = 10
"""The newest records; older ones are removed."""

_SECRETS = re.compile(
    r"""(?i)((?:\bbearer|\bapi[-_]key|\bhf[-_]token|(?<!\w)-hft)["']?[\s:=]+["']?)[^\s"',]+"""
)


class CrashRecord(Wire):
    """How one engine ended, and what was known of it."""

    v: Literal[1] = 1
    generation: int
    instance_id: str
    pid: int
    cause: str
    """Why this engine had been loaded."""
    uptime_s: float
    code: str
    message: str
    evidence: dict[str, Any]
    """What proved it wedged; empty for one that ended by itself."""
    geometry: Geometry | None
    override: Override | None
    n_weight_loads: int | None
    exit: ExitRecord


def of(effect: ev.RecordCrash, uptime_s: float, secrets: Iterable[str]) -> CrashRecord:
    """Return the record, without the `secrets` and what looks like one in the engine's words."""
    engine, record = effect.process.engine, effect.record
    hidden = tuple(filter(None, secrets))
    lines = tuple(_redacted(line, hidden) for line in record.last_lines)
    evidence = {k: v for k, v in effect.problem.details.items() if k != "last_lines"}
    return CrashRecord(
        generation=effect.generation,
        instance_id=effect.process.instance_id,
        pid=engine.pid,
        cause=effect.cause,
        uptime_s=round(uptime_s, 1),
        code=effect.problem.code,
        message=effect.problem.message,
        evidence=evidence,
        geometry=effect.facts.geometry,
        override=effect.override,
        n_weight_loads=effect.facts.n_weight_loads,
        exit=record.model_copy(update={"last_lines": lines}),
    )


def write(directory: Path, record: CrashRecord) -> Path:
    """Write the record, 0600, in one step; remove what is older than the newest `KEPT`.

    Raises OSError.
    """
    path = directory / f"{record.exit.at:%Y%m%dT%H%M%S.%fZ}-{record.generation}.json"
    new = path.with_suffix(".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as out:
        out.write(record.model_dump_json(indent=1).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())
    new.replace(path)
    for old in _all(directory)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def newest(directory: Path) -> Path | None:
    """Return the newest record's path, or None."""
    return next(reversed(_all(directory)), None)


def _all(directory: Path) -> list[Path]:
    """Return the records, the oldest first: their names begin with the time."""
    return sorted(directory.glob("*.json"))


def _redacted(line: str, secrets: tuple[str, ...]) -> str:
    for secret in secrets:
        line = line.replace(secret, "***")
    return _SECRETS.sub(r"\1***", line)
