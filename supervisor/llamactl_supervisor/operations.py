"""The register of operations: what was asked for, by whom, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import uuid4

from llamactl_supervisor.errors import Code, error
from llamactl_supervisor.models import (
    PAGE_KINDS,
    Operation,
    OperationKind,
    OperationState,
    Problem,
)

if TYPE_CHECKING:
    from llamactl_supervisor.models import ApplyPlan, OperationResult

HISTORY_MAX = 200
"""Ended operations that are remembered."""


@dataclass
class _Entry:
    operation: Operation
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.operation.state is not OperationState.RUNNING


class Operations:
    """Operations by id. They survive whoever asked for them; each ends exactly once."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def create(self, kind: OperationKind, by: str) -> Operation:
        """Register a running operation."""
        operation = Operation(
            id=uuid4().hex,
            kind=kind,
            state=OperationState.RUNNING,
            requested_by=by,
            requested_at=datetime.now(UTC),
        )
        self._entries[operation.id] = _Entry(operation)
        return operation

    def discard(self, name: str) -> None:
        """Forget an operation that was not accepted."""
        del self._entries[name]

    def get(self, name: str) -> Operation:
        """Return the operation as it is now; raises `not_found`."""
        entry = self._entry(name)
        if entry.ended:
            entry.told.set()
        return entry.operation

    def running(self) -> Operation | None:
        """Return the oldest operation that has not ended; a page verb only if all others have."""
        left = [entry.operation for entry in self._entries.values() if not entry.ended]
        return min(left, key=lambda operation: operation.kind in PAGE_KINDS, default=None)

    def progress(self, name: str, text: str) -> None:
        """Say where a running operation is."""
        entry = self._entries[name]
        entry.operation = entry.operation.model_copy(update={"progress": text})

    def planned(self, name: str, plan: ApplyPlan) -> None:
        """Say what an apply that is carried out now comes to."""
        entry = self._entries[name]
        entry.operation = entry.operation.model_copy(update={"plan": plan})

    def end(
        self, name: str, outcome: OperationResult | Problem, warning: Problem | None = None
    ) -> Operation:
        """Record the result or the problem, wake who waits for it, and return the operation."""
        entry = self._entries[name]
        failed = isinstance(outcome, Problem)
        entry.operation = entry.operation.model_copy(
            update={
                "state": OperationState.FAILED if failed else OperationState.SUCCEEDED,
                "error" if failed else "result": outcome,
                "warning": warning,
                "progress": "",
                "finished_at": datetime.now(UTC),
            }
        )
        entry.wake.set()
        ended = [key for key, value in self._entries.items() if value.ended]
        for key in ended[: max(0, len(ended) - HISTORY_MAX)]:
            del self._entries[key]
        return entry.operation

    async def wait(self, name: str, wait_s: float) -> Operation:
        """Return the operation at its end, or as it is after `wait_s` seconds.

        Raises `not_found`, and `shutting_down` when the daemon ends before the operation.
        """
        entry = self._entry(name)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(entry.wake.wait(), wait_s)
        if entry.wake.is_set() and not entry.ended:
            raise error(
                Code.SHUTTING_DOWN,
                f"the daemon ends before the {entry.operation.kind} that it was asked for; "
                "an engine that runs is left to the next daemon",
                hint="`llamactl status` of the next daemon tells what came of it",
            )
        return self.get(name)

    def close(self) -> None:
        """Wake who waits: no operation ends any more."""
        for entry in self._entries.values():
            entry.wake.set()

    def nobody_asks(self, name: str) -> None:
        """Say that the end of this operation is awaited by nobody."""
        self._entries[name].told.set()

    async def told(self, wait_s: float) -> None:
        """Return when the end of every `down` was told to somebody, or after `wait_s` seconds."""
        downs = [
            entry.told.wait()
            for entry in self._entries.values()
            if entry.operation.kind is OperationKind.DOWN
        ]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*downs), wait_s)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise error(
                Code.NOT_FOUND,
                f"there is no operation {name!r}",
                hint=f"the last {HISTORY_MAX} operations of this daemon are remembered",
            )
        return self._entries[name]
