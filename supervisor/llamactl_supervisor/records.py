"""What is written down about loads and changes: ledger lines and metrics, never a decision."""

from __future__ import annotations

import asyncio
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import crashes, ledger, procfs
from llamactl_supervisor import events as ev
from llamactl_supervisor.errors import Code
from llamactl_supervisor.metrics import Metrics
from llamactl_supervisor.models import (
    ApplyResult,
    AvoidedLine,
    CarriedLine,
    CarryFate,
    LeftLine,
    LoadLine,
    LostLine,
    OperationKind,
    Problem,
    Receipt,
    ReloadResult,
)

if TYPE_CHECKING:
    from llamactl_supervisor.models import LedgerLine, LostApply, OperationResult
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.snapshot import Snapshot

log = logging.getLogger("llamactl.records")

DAEMON = "daemon"
"""Who asked for a load that nobody asked for."""

STAT_S = 1.0
"""For so long the size of a model is waited for: its disk may be a network's that is gone."""


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
        self.by = DAEMON
        self.ledger_lost = 0
        self.lost: tuple[LostApply, ...] = ()

    def spawned(self, by: str) -> None:
        """Remember for whom an engine is being loaded, until the load has ended."""
        self.by = by

    def state(self, before: Snapshot, after: Snapshot) -> None:
        """Count a change of state."""
        self.metrics.state(after.state)
        if not after.crashes:
            self.crash_record = None
        if after.generation > before.generation and after.crashes:
            self.metrics.retries.inc()
        if after.last_exit is not None and after.last_exit is not before.last_exit:
            self.metrics.log_dropped.inc(after.last_exit.dropped_bytes)

    def trouble(self, before: Snapshot, after: Snapshot) -> None:
        """Log what has gone wrong with the engine since, with how it ended if it did."""
        problem, ended = after.problem, after.last_exit
        if problem is None or problem == before.problem:
            return
        fields = problem.model_dump(mode="json", include={"code", "message", "hint"})
        said = f"{problem.code}: {problem.message}"
        if ended is not None and ended != before.last_exit:
            fields |= {"exit_code": ended.exit_code, "signal": ended.signal}
            said += f" (exit_code={ended.exit_code} signal={ended.signal})"
        log.error("generation=%d %s", after.generation, said, extra={"trouble": fields})

    def sleep(self, before: Snapshot, after: Snapshot) -> None:
        """Log that the engine has fallen asleep: whoever misses a conversation finds it here."""
        if after.facts.work.is_sleeping and not before.facts.work.is_sleeping:
            said = "generation=%d the engine sleeps: what its slots held is gone, pages stay"
            log.info(said, after.generation)

    def ended(self, kind: OperationKind, outcome: OperationResult | Problem) -> None:
        """Count the end of an operation."""
        failed = isinstance(outcome, Problem)
        self.metrics.operations.labels(kind.value, "failed" if failed else "succeeded").inc()
        if isinstance(outcome, ApplyResult) and outcome.applied:
            self.lost = ()
        if isinstance(outcome, ApplyResult | ReloadResult):
            if outcome.receipt is not None:
                self._reconfigured(outcome.receipt)
        elif isinstance(outcome, Receipt):
            self._reconfigured(outcome)
        elif kind is OperationKind.RECONFIGURE:
            self.metrics.reconfigures.labels("failed").inc()

    def refused(self, kind: OperationKind) -> None:
        """Count an operation that was declined before it began."""
        self.metrics.operations.labels(kind.value, "refused").inc()

    def _reconfigured(self, receipt: Receipt) -> None:
        self.metrics.reconfigures.labels(receipt.outcome).inc()
        if receipt.outcome == "applied":
            self.metrics.pause_s.observe(receipt.pause_ms / 1000)

    async def record(self, effect: ev.Record, by: str, load_by: str) -> None:
        """Count and write down a load, one that was avoided, an end, what was carried.

        `by` asked for what is under way, `load_by` for the engine that it is about.
        """
        match effect:
            case ev.RecordLoad():
                if effect.loaded:
                    self._count_load(effect)
                await self._load(effect, load_by, datetime.now(UTC))
            case ev.RecordAvoided():
                self.metrics.loads_avoided.inc()
                avoided = self.totals.loads_avoided + 1
                self.totals = self.totals.model_copy(update={"loads_avoided": avoided})
                await self._avoided(effect, datetime.now(UTC))
            case ev.RecordCarried():
                lost, back = effect.report.of(CarryFate.LOST), effect.report.of(CarryFate.BACK)
                self.metrics.conversations_carried.inc(len(back))
                self.metrics.conversations_lost.inc(len(lost))
                asked_by = by if effect.way == "out" else load_by
                await self._carried(effect, asked_by, datetime.now(UTC))
            case ev.RecordLeft():
                await self._left(effect, datetime.now(UTC))
            case ev.RecordLost():
                self.lost = (*self.lost, effect.lost)
                why = "the apply by %s that the daemon before did not finish: %s"
                log.warning(why, effect.lost.by, effect.lost.came_to)
                line = LostLine(at=datetime.now(UTC), **dict(effect.lost))
                await self._append(line)
            case ev.RecordCrash():
                self.metrics.crashes.inc()
                if effect.problem.code == Code.ENGINE_WEDGED:
                    self.metrics.wedges.inc()
                await self._crash(effect)

    def _count_load(self, effect: ev.RecordLoad) -> None:
        if effect.load_s is not None:
            self.metrics.load_s.observe(effect.load_s)
        if effect.cause is ev.LoadCause.WAKE:
            self.metrics.wakes.inc()
        self.metrics.weight_loads.inc()
        loads = self.totals.weight_loads + 1
        self.totals = self.totals.model_copy(update={"weight_loads": loads})

    async def _load(self, effect: ev.RecordLoad, load_by: str, at: datetime) -> None:
        nobody = {ev.LoadCause.WAKE: "a request", ev.LoadCause.ADOPT: DAEMON}
        by, spec = effect.by or nobody.get(effect.cause, load_by), effect.spec
        line = LoadLine(
            at=at,
            generation=effect.generation,
            cause=effect.cause,
            by=by,
            loaded=effect.loaded,
            aborted=effect.aborted,
            load_s=effect.load_s,
            port_closed_s=effect.port_closed_s,
            model=spec.model,
            model_bytes=await _size(spec.model),
            n_ctx=spec.n_ctx,
            n_seq=spec.n_seq,
            dropped=effect.dropped,
            reasons=effect.reasons,
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

    async def _carried(self, effect: ev.RecordCarried, by: str, at: datetime) -> None:
        report = effect.report
        if report.problem is not None:
            log.warning("conversations: %s", report.problem.message)
        for each in report.of(CarryFate.LOST, CarryFate.LEFT, CarryFate.DROPPED):
            why = "conversation %s: %s (%d tokens, %s): %s"
            log.warning(why, each.fate, each.what, each.n_tokens, each.file, each.reason)
        line = CarriedLine(
            at=at,
            way=effect.way,
            by=by,
            took_s=report.took_s,
            quiet_s=report.quiet_s,
            n_bytes=report.n_bytes,
            conversations=report.conversations,
            problem=report.problem,
        )
        await self._append(line)

    async def _left(self, effect: ev.RecordLeft, at: datetime) -> None:
        await self._append(
            LeftLine(
                at=at, by=effect.by, outcome=effect.outcome, lingered_s=round(effect.lingered_s, 3)
            )
        )

    async def _crash(self, effect: ev.RecordCrash) -> None:
        try:
            self.crash_record = await asyncio.to_thread(self._keep, effect)
        except OSError as exc:
            log.error("crash record lost: %s: %s", self._crashes, exc)

    def _keep(self, effect: ev.RecordCrash) -> Path:
        since_s = max(0.0, (datetime.now(UTC) - effect.record.at).total_seconds())
        uptime_s = max(0.0, procfs.uptime_s(effect.process.engine) - since_s)
        record = crashes.of(effect, uptime_s, _lines(effect.api_key_file))
        return crashes.write(self._crashes, record)

    async def _append(self, line: LedgerLine) -> None:
        try:
            await asyncio.to_thread(ledger.append, self._path, line)
        except OSError as exc:
            self.metrics.ledger_lost.inc()
            self.ledger_lost += 1
            log.error("ledger line lost: %s: %s", self._path, exc)


def _lines(api_key_file: str | None) -> list[str]:
    """Return the keys in the file, none when it cannot be read."""
    if api_key_file is None:
        return []
    try:
        return Path(api_key_file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []


async def _size(path: str) -> int | None:
    """Return the bytes of the file; None where its disk does not say so at once."""
    try:
        found = await asyncio.wait_for(asyncio.to_thread(os.stat, path), STAT_S)
    except OSError:  # a timeout is one
        return None
    return found.st_size
