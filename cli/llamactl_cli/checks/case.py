"""What is known before any check: paths, the daemon's status, what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl_supervisor.errors import LlamactlError

from llamactl_cli import remains

if TYPE_CHECKING:
    from llamactl_supervisor.config import Paths
    from llamactl_supervisor.models import Status


@dataclass(frozen=True)
class Case:
    """`status` None: no daemon answers, and `silence` says how."""

    paths: Paths
    status: Status | None
    silence: str
    saved: dict[str, Any]

    @classmethod
    def of(cls, paths: Paths) -> Case:
        """Return what can be known now."""
        from llamactl_supervisor.client import ControlClient

        with ControlClient(paths) as client:
            try:
                status, silence = client.status(), ""
            except LlamactlError as exc:
                status, silence = None, exc.message
        return cls(paths, status, silence, remains.saved(paths))

    @property
    def request(self) -> dict[str, Any]:
        """What was last asked for: `spec` and `engine_path`; empty where nothing was."""
        if self.status is not None and self.status.desired is not None:
            return self.status.desired.model_dump(mode="json")
        desired = self.saved.get("desired")
        return desired if isinstance(desired, dict) else {}

    @property
    def spec(self) -> dict[str, Any]:
        """The engine that was last asked for; empty where none was."""
        spec = self.request.get("spec")
        return spec if isinstance(spec, dict) else {}

    @property
    def engine_pid(self) -> int | None:
        """The engine that runs, with its daemon or without."""
        if self.status is not None:
            return None if self.status.engine is None else self.status.engine.pid
        return next(iter(remains.engine_pids(self.paths)), None)
