"""`llamactl run`: whose the engine is, what the owner's process is like, what he is told."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from llamactl_supervisor.fields import (
    ARGS_MAX,
    CPUS_MAX,
    ENV_MAX,
    PORT_MAX,
    AbsolutePath,
    CpuNumber,
    EnvName,
    EnvValue,
    Rlimit,
)
from llamactl_supervisor.models.base import Problem, Wire


class ProcessContext(Wire):
    """What a process has from the one who starts it, as whoever called `llamactl run` has it.

    `rlimits` are soft and hard, -1 is unlimited. `env` has no secrets: those lie in a file of ours,
    and `secrets` is the fingerprint that names it.
    """

    cwd: AbsolutePath
    umask: Annotated[int, Field(strict=True, ge=0, le=0o777)] = 0o022
    nice: Annotated[int, Field(strict=True, ge=-20, le=19)] = 0
    affinity: Annotated[tuple[CpuNumber, ...], Field(min_length=1, max_length=CPUS_MAX)]
    rlimits: dict[Rlimit, tuple[int, int]] = {}
    env: Annotated[dict[EnvName, EnvValue], Field(max_length=ENV_MAX)] = {}
    secrets: str | None = None

    def words(self) -> dict[str, str]:
        """Return it by field, as a person reads it; two that differ in none are the same."""
        told = {
            "cwd": self.cwd,
            "umask": f"{self.umask:04o}",
            "nice": str(self.nice),
            "affinity": ",".join(map(str, self.affinity)),
        }
        told |= {f"rlimit {name}": f"{soft}:{hard}" for name, (soft, hard) in self.rlimits.items()}
        told |= {f"env {name}": value for name, value in self.env.items()}
        return told if self.secrets is None else told | {"secrets": self.secrets}


class RunRequest(Wire):
    """Be the engine's owner: what `llamactl run` was called with, and by what kind of process.

    `engine_path` None: the one that is configured, else the last one. `instance_id`: be the owner
    of this very engine again, as it is. `linger_s` None: as the daemon is configured.
    `overcommit`: a load that memory is not known to suffice for is no matter.
    """

    argv: Annotated[tuple[EnvValue, ...], Field(max_length=ARGS_MAX)]
    engine_path: AbsolutePath | None = None
    host: str
    port: Annotated[int, Field(strict=True, ge=0, le=PORT_MAX)]
    linger_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] | None = None
    instance_id: str | None = None
    overcommit: bool = False
    context: ProcessContext


class RunMessage(Wire):
    """One line of what a run is told. Which fields it has follows from `event`.

    `accepted` (run): it is the owner. `listen` (instance_id, pid, socket, linger_s): the engine is
    being loaded. `ready` (the same): it serves. `notice` (text). `exit` (code or signal, text): the
    engine has ended. `refused` (problem). After these two nothing follows.
    """

    event: Literal["accepted", "listen", "ready", "notice", "exit", "refused"]
    run: str | None = None
    instance_id: str | None = None
    pid: int | None = None
    socket: str | None = None
    linger_s: float | None = None
    text: str | None = None
    code: int | None = None
    signal: int | None = None
    problem: Problem | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.event in {"exit", "refused"}


class Owner(Wire):
    """The run that has the engine, and where its clients find it. `id` names it for the daemon."""

    id: str
    pid: int
    host: str
    port: int
    linger_s: float


class Departure(StrEnum):
    """What became of the engine that a run had left."""

    TAKEN = "taken"
    """The next run had it as it was, or live in another geometry."""
    REPLACED = "replaced"
    """The next run asked for what takes another process."""
    EXPIRED = "expired"
    """Nobody came in time."""
    STOPPED = "stopped"
    """Somebody stopped it, or it was to end with its owner."""
    PRESSURE = "pressure"
    """The memory was needed."""
    EXITED = "exited"
    """It ended by itself."""
    ABORTED = "aborted"
    """It was still being loaded, and was wanted by nobody then."""
