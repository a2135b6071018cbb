"""What tests of a daemon over a fake engine look at: its ledger, its crash records, its loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamactl_supervisor.models import EngineState
from sandbox import until

if TYPE_CHECKING:
    from llamactl_supervisor.models import Status
    from sandbox import Sandbox

IDLE_S = 1.0
"""How long an engine may stand still in these tests."""


def ledger(box: Sandbox) -> list[dict[str, Any]]:
    return [json.loads(line) for line in box.paths.ledger_file.read_text().splitlines()]


def causes(box: Sandbox) -> list[str]:
    lines = (line for line in ledger(box) if line["kind"] not in {"carried", "lost"})
    return [line.get("cause", "avoided") for line in lines]


def crash_record(box: Sandbox) -> dict[str, Any]:
    """Return the newest crash record, once there is one."""
    path = until(lambda: box.client.status().crash_record or "")
    record: dict[str, Any] = json.loads(Path(path).read_text())
    return record


def until_generation(box: Sandbox, generation: int) -> Status:
    """Wait until an engine of this generation is ready."""

    def ready() -> Status | None:
        status = box.client.status()
        there = (status.generation, status.state) == (generation, EngineState.READY)
        return status if there else None

    found = until(ready)
    assert found is not None
    return found
