"""What `status` shows of engines whose daemon is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl_cli import holdings, smaps, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.models import AvoidedLine
    from llamactl_supervisor.remains import Remnant

    from llamactl_cli.smaps import Resident


@dataclass(frozen=True)
class RemainsView:
    """What can be known of engines whose daemon is gone."""

    engines: list[Remnant]
    model: str | None
    resident: Mapping[int, Resident]
    pauses: tuple[AvoidedLine, ...]

    @classmethod
    def of(
        cls, engines: list[Remnant], model: str | None, pauses: tuple[AvoidedLine, ...]
    ) -> RemainsView:
        """Return the view of `engines`, each with its memory, and of the `model` asked for last."""
        read = ((engine.pid, smaps.resident(engine.pid, model)) for engine in engines)
        resident = {pid: found for pid, found in read if found is not None}
        return cls(engines, model, resident, pauses)

    def text(self) -> str:
        """Return the table."""
        rows: list[tuple[str, str | None]] = []
        for engine in self.engines:
            age = "" if engine.age_s is None else f", up {text.seconds(engine.age_s)}"
            rows.append(("engine", f"runs without a daemon, pid {engine.pid}{age}"))
            model = self._model(engine)
            rows.append(("model", None if model is None else text.middle(model, text.PATH_COLUMNS)))
            if parts := self._memory(engine):
                rows += holdings.memory_rows(parts)
        return text.screen([*rows, *holdings.pauses(self.pauses)])

    def data(self) -> dict[str, Any]:
        """Return the same."""
        engines = [
            {"pid": engine.pid, "instance_id": engine.instance_id, "uptime_s": engine.age_s}
            | {"adoptable": engine.adoptable, "model": self._model(engine)}
            | {"memory": self._memory(engine)}
            for engine in self.engines
        ]
        pauses = [line.model_dump(mode="json") for line in self.pauses]
        return {"daemon": None, "engines": engines, "pauses": pauses}

    def _model(self, engine: Remnant) -> str | None:
        return self.model if engine.adoptable else None

    def _memory(self, engine: Remnant) -> dict[str, Any] | None:
        found = self.resident.get(engine.pid)
        return None if found is None else holdings.memory(found, None, None)
