"""The daemon's own Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llamactl_supervisor.models import EngineState

PAUSE_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LOAD_BUCKETS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """One registry per daemon. No label ever holds what a user typed."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._state = Gauge(
            "llamactl_engine_state",
            "1 for the state the engine is in, 0 for the others",
            ["state"],
            registry=self.registry,
        )
        self.crashes = Counter(
            "llamactl_engine_crashes",
            "Ends of the engine that nobody asked for",
            registry=self.registry,
        )
        self.wedges = Counter(
            "llamactl_engine_wedges",
            "Engines that got nowhere and were replaced; each is a crash as well",
            registry=self.registry,
        )
        self.wakes = Counter(
            "llamactl_engine_wakes",
            "Weight loads after a sleep of the engine; each is a weight load as well",
            registry=self.registry,
        )
        self.load_s = Histogram(
            "llamactl_weight_load_seconds",
            "From the engine's start until it was healthy",
            buckets=LOAD_BUCKETS_S,
            registry=self.registry,
        )
        self.reconfigures = Counter(
            "llamactl_reconfigures",
            "Reconfigures by outcome: applied, unchanged, planned, failed",
            ["outcome"],
            registry=self.registry,
        )
        self.pause_s = Histogram(
            "llamactl_reconfigure_pause_seconds",
            "Time without a token in an applied reconfigure",
            buckets=PAUSE_BUCKETS_S,
            registry=self.registry,
        )
        self.ledger_lost = Counter(
            "llamactl_ledger_lines_lost", "Ledger lines that no disk took", registry=self.registry
        )
        self.weight_loads = Counter(
            "llamactl_weight_loads",
            "Weight loads that succeeded, over all daemons",
            registry=self.registry,
        )
        self.loads_avoided = Counter(
            "llamactl_loads_avoided",
            "Relaunches that a reconfigure took the place of, over all daemons",
            registry=self.registry,
        )
        self.state(EngineState.STOPPED)

    def state(self, state: EngineState) -> None:
        """Show `state` as the present one."""
        for each in EngineState:
            self._state.labels(each.value).set(each is state)

    def text(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)
