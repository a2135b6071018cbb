"""What `llamactl doctor` looks at. A check reads and touches nothing, and says what to do.

    case       what is known before any check: paths, the daemon's status, what was asked for
    machine    python, tools for a build, engine, processor, limits, memory
    options    what sets options of the engine beside our configuration
    places     directories, the control socket, the port, the model, API keys
    service    daemon, configuration, orphans, systemd, the command on PATH

Each module has `CHECKS`, functions of a `Case` that yield findings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """`warn` may be as it should be, `fail` cannot work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One answer. `do` None: nothing is to be done."""

    check: str
    level: Level
    found: str
    do: str | None = None


def ok(check: str, found: str) -> Finding:
    """Return that all is well."""
    return Finding(check, Level.OK, found)


def warn(check: str, found: str, do: str) -> Finding:
    """Return what may be wrong."""
    return Finding(check, Level.WARN, found, do)


def fail(check: str, found: str, do: str) -> Finding:
    """Return what is wrong."""
    return Finding(check, Level.FAIL, found, do)
