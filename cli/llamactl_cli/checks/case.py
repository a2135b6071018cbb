"""What is known before any check: paths, the daemon's status, what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import LlamactlError

from llamactl_cli import remains

if TYPE_CHECKING:
    from llamactl_supervisor.config import Paths
    from llamactl_supervisor.models import EngineRequest, Status, UpRequest


@dataclass(frozen=True)
class Case:
    """`status` None: no daemon answers, and `silence` says how. `request` is what was asked for."""

    paths: Paths
    status: Status | None
    silence: str
    request: UpRequest | None

    @classmethod
    def of(cls, paths: Paths) -> Case:
        """Return what can be known now."""
        from llamactl_supervisor.client import ControlClient

        with ControlClient(paths) as client:
            try:
                status = client.status()
            except LlamactlError as exc:
                return cls(paths, None, exc.message, _saved(paths))
        return cls(paths, status, "", status.desired)

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
        return next(iter(remains.engine_pids(self.paths)), None)


def _saved(paths: Paths) -> UpRequest | None:
    from llamactl_supervisor.models import UpRequest

    try:
        return UpRequest.parse(remains.saved(paths).get("desired") or {})
    except LlamactlError:
        return None
