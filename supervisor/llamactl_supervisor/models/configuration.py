"""What the daemon says of its configuration: what it has read, and what is in force."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from llamactl_supervisor.models.base import Problem, Wire


class Takes(StrEnum):
    """What a changed key of the configuration needs to come into force, after a reload."""

    RELOAD = "reload"
    ENGINE_RESTART = "engine_restart"
    DAEMON_RESTART = "daemon_restart"


class ConfigValue(Wire):
    """A key of the configuration in a daemon: what it took of it, and what it goes by.

    `running` is in force; for [engine] it is what the engine was asked for at last, by whomever.
    `after_restart` is what the next start of the engine goes by, where nobody asks for another.
    `pinned` is what the daemon was started with that no file changes: `env NAME`, `flag NAME`.
    """

    read: Any
    running: Any
    after_restart: Any
    takes: Takes
    pinned: str | None = None


class ConfigStatus(Wire):
    """What became of the configuration.

    `digest` is the SHA-256 of the file of which all is in force, or will be at the next start
    where no engine runs. It is null where there is no file, and while something of it is not:
    what waits for a restart, or was changed by hand, is in `unapplied`. `problem` says why a newer
    one is not.
    """

    file: str | None
    digest: str | None
    problem: Problem | None = None


class RunningConfig(Wire):
    """The configuration as a daemon has it. `file` None: it found none when it was started."""

    pid: int
    file: str | None
    values: dict[str, ConfigValue]
