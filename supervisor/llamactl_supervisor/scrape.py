"""The engine's metrics beside ours in one scrape; its counters never go back over a restart."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import TYPE_CHECKING

import psutil
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from llamactl_supervisor import procfs
from llamactl_supervisor.engine_metrics import MAXIMUM, PREFIX
from llamactl_supervisor.errors import LlamactlError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import Metric
    from prometheus_client.samples import Sample

    from llamactl_supervisor.engine import EngineClient
    from llamactl_supervisor.metrics import Metrics
    from llamactl_supervisor.snapshot import Snapshot

    Key = tuple[str, frozenset[tuple[str, str]]]

log = logging.getLogger("llamactl.scrape")

_ADDS_UP = frozenset(["counter", "histogram"])


class Families(Collector):
    """Metrics that are known already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """Return them."""
        return self._families


class EngineCounters:
    """What the counters of all engines of this daemon add up to."""

    def __init__(self) -> None:
        self._instance = ""
        self._last: dict[Key, float] = {}
        self._before: defaultdict[Key, float] = defaultdict(float)

    def families(self, instance: str, exposition: bytes) -> list[Metric]:
        """Return the engine's metrics with what came before added to its counters.

        Raises ValueError when the exposition is none; nothing is remembered of it then.
        """
        wrong, right = (f"# TYPE {PREFIX}{MAXIMUM} {kind}" for kind in ("counter", "gauge"))
        text = exposition.decode().replace(wrong, right)
        found = list(text_string_to_metric_families(text))
        if instance != self._instance:
            self._instance = instance
            self._bury(list(self._last))
        families = [family for family in found if family.name.startswith(PREFIX)]
        for family in families:
            if family.type in _ADDS_UP:
                family.samples = self._added(family.samples)
        return families

    def _added(self, samples: list[Sample]) -> list[Sample]:
        now = {_key(sample): sample.value for sample in samples}
        # One engine's counters begin anew too: when it has slept.
        if any(value < self._last.get(key, 0.0) for key, value in now.items()):
            self._bury([key for key in now if key in self._last])
        self._last |= now
        return [
            sample._replace(value=sample.value + self._before[_key(sample)]) for sample in samples
        ]

    def _bury(self, keys: list[Key]) -> None:
        for key in keys:
            self._before[key] += self._last.pop(key)


class Scrape:
    """Asks the engine when we are asked, and never else: its gauges average over two scrapes."""

    def __init__(
        self,
        metrics: Metrics,
        snapshot: Callable[[], Snapshot],
        engine: Callable[[], EngineClient],
    ) -> None:
        """`engine` raises a `LlamactlError` where there is none that serves."""
        self._metrics, self._snapshot, self._engine = metrics, snapshot, engine
        self._counters = EngineCounters()
        self._turn = asyncio.Lock()
        self._complaint = ""

    async def text(self) -> bytes:
        """Return our metrics and, if it answers in time, the engine's. Wakes nothing."""
        async with self._turn:  # no answer may overtake an older one
            families = await self._ask()
        self._show(self._snapshot())
        self._metrics.scrape_ok.set(bool(families))
        return self._metrics.text() + generate_latest(Families(families))

    async def _ask(self) -> list[Metric]:
        try:
            engine = self._engine()
        except LlamactlError:
            return []
        try:
            exposition = await engine.metrics()
            families = self._counters.families(engine.process.instance_id, exposition)
        except (LlamactlError, ValueError) as exc:
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                log.warning("no metrics from the engine: %s", exc)
            return []
        self._complaint = ""
        return families

    def _show(self, snapshot: Snapshot) -> None:
        metrics, running = self._metrics, snapshot.process
        memory, uptime_s = None, 0.0
        if running is not None:
            uptime_s = procfs.uptime_s(running.engine)
            try:
                memory = psutil.Process(running.engine.pid).memory_info()
            except psutil.Error:
                uptime_s = 0.0
        geometry = snapshot.facts.geometry
        metrics.generation.set(snapshot.generation)
        metrics.uptime_s.set(uptime_s)
        metrics.resident_bytes.set(0 if memory is None else memory.rss)
        metrics.committed_bytes.set(0 if memory is None else memory.data)
        metrics.n_ctx.set(0 if geometry is None else geometry.n_ctx)
        metrics.n_seq.set(0 if geometry is None else geometry.n_seq)


def _key(sample: Sample) -> Key:
    return sample.name, frozenset(sample.labels.items())
