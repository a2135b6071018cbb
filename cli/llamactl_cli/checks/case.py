"""What is known before any check: paths, the daemon's status, what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import LlamactlError

from llamactl_cli.connect import of_daemon

if TYPE_CHECKING:
    from llamactl_supervisor.config import Paths
    from llamactl_supervisor.models import EngineRequest, Status, UpRequest


@dataclass(frozen=True)
class Case:
    """`paths` are those of the daemon that answers; `request` is what was asked for.

    `status` None: no daemon answers, and `silence` says how.
    """

    paths: Paths
    status: Status | None
    silence: str
    request: UpRequest | None

    @classmethod
    def of(cls, paths: Paths) -> Case:
        """Return what can be known now."""
        from llamactl_supervisor import remains
        from llamactl_supervisor.client import Client

        with Client(paths) as client:
            try:
                status = client.status()
            except LlamactlError as exc:
                return cls(paths, None, exc.message, remains.desired(paths))
        return cls(of_daemon(paths, status.daemon), status, "", status.desired)

    @property
    def spec(self) -> EngineRequest | None:
        """The engine that was last asked for."""
        return None if self.request is None else self.request.spec

    @property
    def model(self) -> str | None:
        """Its model."""
        return None if self.spec is None else self.spec.model

    @property
    def engine_pid(self) -> int | None:
        """The engine that runs, with its daemon or without."""
        if self.status is not None:
            return None if self.status.engine is None else self.status.engine.pid
        from llamactl_supervisor import remains

        return next(iter(remains.engine_pids(self.paths)), None)
