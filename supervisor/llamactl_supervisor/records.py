"""What is written down about loads and changes: ledger lines and metrics, never a decision."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor import ledger
from llamactl_supervisor.events import LoadCause
from llamactl_supervisor.launch import live_spec
from llamactl_supervisor.metrics import Metrics
from llamactl_supervisor.models import (
    AvoidedLine,
    EngineState,
    LoadLine,
    OperationKind,
    Problem,
    Receipt,
    ReloadResult,
)

if TYPE_CHECKING:
    from llamactl_supervisor.models import EngineRequest, LedgerLine, OperationResult
    from llamactl_supervisor.snapshot import Snapshot

log = logging.getLogger("llamactl.records")


class Records:
    """The ledger with its sums, and the metrics. A ledger that cannot be written is counted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.metrics = Metrics()
        self.totals = ledger.read(path, limit=0).totals
        self.metrics.weight_loads.inc(self.totals.weight_loads)
        self.metrics.loads_avoided.inc(self.totals.loads_avoided)
        self._spec: EngineRequest | None = None
        self._by = "daemon"

    def spawned(self, effect: ev.Spawn, by: str) -> None:
        """Remember what is being loaded and for whom, until the load has ended."""
        self._spec, self._by = live_spec(effect.request.spec, effect.override), by

    def state(self, before: Snapshot, after: Snapshot) -> None:
        """Count a change of state."""
        self.metrics.state(after.state)
        ended = after.state in {EngineState.CRASHED, EngineState.FAILED}
        if ended and before.state is not EngineState.CRASHED:
            self.metrics.crashes.inc()
        if after.state is EngineState.STARTING and after.cause is LoadCause.CRASH:
            self.metrics.retries.inc()
        if after.last_exit is not None and after.last_exit is not before.last_exit:
            self.metrics.log_dropped.inc(after.last_exit.dropped_bytes)

    def ended(self, kind: OperationKind, outcome: OperationResult | Problem) -> None:
        """Count the end of an operation."""
        failed = isinstance(outcome, Problem)
        self.metrics.operations.labels(kind.value, "failed" if failed else "succeeded").inc()
        if isinstance(outcome, ReloadResult):
            if outcome.receipt is not None:
                self._reconfigured(outcome.receipt)
        elif isinstance(outcome, Receipt):
            self._reconfigured(outcome)
        elif kind is OperationKind.RECONFIGURE:
            self.metrics.reconfigures.labels("failed").inc()

    def _reconfigured(self, receipt: Receipt) -> None:
        self.metrics.reconfigures.labels(receipt.outcome).inc()
        if receipt.outcome == "applied":
            self.metrics.pause_s.observe(receipt.pause_ms / 1000)

    async def record(self, effect: ev.RecordLoad | ev.RecordAvoided) -> None:
        """Record a weight load, one that failed, or one that a reconfigure took the place of."""
        if isinstance(effect, ev.RecordLoad):
            await self._load(effect)
        else:
            await self._avoided(effect)

    async def _load(self, effect: ev.RecordLoad) -> None:
        if self._spec is None:
            return
        line = LoadLine(
            at=datetime.now(UTC),
            generation=effect.generation,
            cause=effect.cause,
            by=self._by,
            loaded=effect.loaded,
            load_s=effect.load_s,
            model=self._spec.model,
            model_bytes=await asyncio.to_thread(_size, self._spec.model),
            n_ctx=self._spec.n_ctx,
            n_seq=self._spec.n_seq,
        )
        if effect.loaded:
            self.metrics.load_s.observe(effect.load_s)
            self.metrics.weight_loads.inc()
            loads = self.totals.weight_loads + 1
            self.totals = self.totals.model_copy(update={"weight_loads": loads})
        await self._append(line)

    async def _avoided(self, effect: ev.RecordAvoided) -> None:
        receipt = effect.receipt
        self.metrics.loads_avoided.inc()
        avoided = self.totals.loads_avoided + 1
        self.totals = self.totals.model_copy(update={"loads_avoided": avoided})
        line = AvoidedLine(
            at=datetime.now(UTC),
            by=effect.by,
            pause_ms=receipt.pause_ms,
            tokens_held=receipt.tokens_held,
            previous=receipt.previous,
            geometry=receipt.geometry,
        )
        await self._append(line)

    async def _append(self, line: LedgerLine) -> None:
        try:
            await asyncio.to_thread(ledger.append, self._path, line)
        except OSError as exc:
            self.metrics.ledger_lost.inc()
            log.error("ledger line lost: %s: %s", self._path, exc)


def _size(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except OSError:
        return None
