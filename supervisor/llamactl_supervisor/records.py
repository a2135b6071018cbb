"""What is written down about loads and changes: ledger lines and metrics, never a decision."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import crashes, ledger, process
from llamactl_supervisor import events as ev
from llamactl_supervisor.errors import Code
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
from llamactl_supervisor.snapshot import RETRIES

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from llamactl_supervisor.models import LedgerLine, OperationResult
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.snapshot import Snapshot

log = logging.getLogger("llamactl.records")

DAEMON = "daemon"
"""Who asked for a load that nobody asked for."""


class Records:
    """The ledger with its sums, the crash records and the metrics.

    A ledger that cannot be written is counted.
    """

    def __init__(self, paths: Paths) -> None:
        self._path, self._crashes = paths.ledger_file, paths.crashes
        self.metrics = Metrics()
        self.totals = ledger.read(self._path, limit=0).totals
        self.crash_record = crashes.newest(self._crashes)
        self.metrics.weight_loads.inc(self.totals.weight_loads)
        self.metrics.loads_avoided.inc(self.totals.loads_avoided)
        self._by = DAEMON

    def spawned(self, by: str) -> None:
        """Remember for whom an engine is being loaded, until the load has ended."""
        self._by = by

    def state(self, before: Snapshot, after: Snapshot) -> None:
        """Count a change of state."""
        self.metrics.state(after.state)
        ended = after.state in {EngineState.CRASHED, EngineState.FAILED}
        if ended and before.state is not EngineState.CRASHED:
            self.metrics.crashes.inc()
        if after.state is EngineState.STARTING and after.cause in RETRIES:
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

    def record(
        self, effect: ev.RecordLoad | ev.RecordAvoided | ev.RecordCrash
    ) -> Coroutine[None, None, None]:
        """Count a weight load, one that was avoided, or an end that nobody had asked for.

        It counts at once; what is returned writes it down.
        """
        match effect:
            case ev.RecordLoad():
                if effect.loaded:
                    self._count_load(effect)
                return self._load(effect, datetime.now(UTC))
            case ev.RecordAvoided():
                self.metrics.loads_avoided.inc()
                avoided = self.totals.loads_avoided + 1
                self.totals = self.totals.model_copy(update={"loads_avoided": avoided})
                return self._avoided(effect, datetime.now(UTC))
            case ev.RecordCrash():
                if effect.problem.code == Code.ENGINE_WEDGED:
                    self.metrics.wedges.inc()
                return self._crash(effect)

    def _count_load(self, effect: ev.RecordLoad) -> None:
        if effect.load_s is not None:
            self.metrics.load_s.observe(effect.load_s)
        if effect.cause is ev.LoadCause.WAKE:
            self.metrics.wakes.inc()
        self.metrics.weight_loads.inc()
        loads = self.totals.weight_loads + 1
        self.totals = self.totals.model_copy(update={"weight_loads": loads})

    async def _load(self, effect: ev.RecordLoad, at: datetime) -> None:
        nobody = {ev.LoadCause.WAKE: "a request", ev.LoadCause.ADOPT: DAEMON}
        by, spec = nobody.get(effect.cause, self._by), effect.spec
        line = LoadLine(
            at=at,
            generation=effect.generation,
            cause=effect.cause,
            by=by,
            loaded=effect.loaded,
            load_s=effect.load_s,
            model=spec.model,
            model_bytes=await asyncio.to_thread(_size, spec.model),
            n_ctx=spec.n_ctx,
            n_seq=spec.n_seq,
            dropped=effect.dropped,
        )
        await self._append(line)

    async def _avoided(self, effect: ev.RecordAvoided, at: datetime) -> None:
        receipt = effect.receipt
        line = AvoidedLine(
            at=at,
            by=effect.by,
            pause_ms=receipt.pause_ms,
            tokens_held=receipt.tokens_held,
            previous=receipt.previous,
            geometry=receipt.geometry,
        )
        await self._append(line)

    async def _crash(self, effect: ev.RecordCrash) -> None:
        try:
            self.crash_record = await asyncio.to_thread(self._keep, effect)
        except OSError as exc:
            log.error("crash record lost: %s: %s", self._crashes, exc)

    def _keep(self, effect: ev.RecordCrash) -> Path:
        uptime_s = process.uptime_s(effect.process.engine)
        record = crashes.of(effect, uptime_s, _lines(effect.api_key_file))
        return crashes.write(self._crashes, record)

    async def _append(self, line: LedgerLine) -> None:
        try:
            await asyncio.to_thread(ledger.append, self._path, line)
        except OSError as exc:
            self.metrics.ledger_lost.inc()
            log.error("ledger line lost: %s: %s", self._path, exc)


def _lines(api_key_file: str | None) -> list[str]:
    """Return the keys in the file, none when it cannot be read."""
    if api_key_file is None:
        return []
    try:
        return Path(api_key_file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []


def _size(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except OSError:
        return None
