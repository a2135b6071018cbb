"""The daemon's own Prometheus metrics."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from llamactl_supervisor.models import EngineState, OperationKind

disable_created_metrics()  # type: ignore[no-untyped-call]

PAUSE_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LOAD_BUCKETS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)


CONFIG_HASH_DIGITS = 12
"""As many as a sample holds exactly."""


class Metrics:
    """One registry per daemon. No label ever holds what a user typed."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine()
        self._config()
        self._operations()
        self._ledger()
        ProcessCollector(namespace="llamactl_daemon", registry=self.registry)
        self.state(EngineState.STOPPED)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"llamactl_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"llamactl_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"llamactl_{name}", text, buckets=buckets, registry=self.registry)

    def _engine(self) -> None:
        self._state = Gauge(
            "llamactl_engine_state",
            "1 for the state the engine is in, 0 for the others",
            ["state"],
            registry=self.registry,
        )
        self.scrape_ok = self._gauge(
            "engine_scrape_ok", "1 if the engine's own metrics are part of this scrape"
        )
        self.generation = self._gauge(
            "engine_generation", "Engines that were ever started in this state directory"
        )
        self.uptime_s = self._gauge("engine_uptime_seconds", "Age of the engine's process")
        self.resident_bytes = self._gauge(
            "engine_resident_bytes", "Memory of the engine that is in RAM, the model file included"
        )
        self.committed_bytes = self._gauge(
            "engine_committed_bytes",
            "Memory that the engine has for itself, whether it was ever touched or not",
        )
        self.n_ctx = self._gauge("engine_context_tokens", "Context over all slots, as it is now")
        self.n_seq = self._gauge("engine_slots", "Slots, as they are now")
        self.crashes = self._counter("engine_crashes", "Ends of the engine that nobody asked for")
        self.wedges = self._counter(
            "engine_wedges", "Engines that got nowhere and were replaced; each is a crash as well"
        )
        self.wakes = self._counter(
            "engine_wakes", "Weight loads after a sleep; each is a weight load as well"
        )
        self.retries = self._counter(
            "engine_retries", "Starts of the engine after a crash or a start that failed"
        )
        self.log_dropped = self._counter(
            "engine_log_dropped_bytes",
            "Output that no disk took, of engines that have ended",
        )

    def _config(self) -> None:
        self.config_hash = self._gauge(
            "config_hash",
            f"First {CONFIG_HASH_DIGITS} hexadecimal digits of the SHA-256 of the configuration "
            "file of which all is in force, as a number; 0 where there is none",
        )
        self.config_ok = self._gauge(
            "config_ok", "0 if something that the configuration file says is not in force, else 1"
        )

    def _operations(self) -> None:
        self.operations = self._counter(
            "operations",
            "Operations by kind and outcome; refused: declined before it began",
            ("kind", "outcome"),
        )
        for kind in OperationKind:
            for outcome in ("succeeded", "failed", "refused"):
                self.operations.labels(kind.value, outcome)
        self.reconfigures = self._counter(
            "reconfigures",
            "Reconfigures by outcome: applied, unchanged, planned, failed",
            ("outcome",),
        )
        for outcome in ("applied", "unchanged", "planned", "failed"):
            self.reconfigures.labels(outcome)
        self.pause_s = self._histogram(
            "reconfigure_pause_seconds",
            "Time without a token in an applied reconfigure",
            PAUSE_BUCKETS_S,
        )

    def _ledger(self) -> None:
        self.load_s = self._histogram(
            "weight_load_seconds", "From the engine's start until it was healthy", LOAD_BUCKETS_S
        )
        self.weight_loads = self._counter(
            "weight_loads", "Weight loads that succeeded, over all daemons"
        )
        self.loads_avoided = self._counter(
            "loads_avoided", "Relaunches that a reconfigure took the place of, over all daemons"
        )
        self.conversations_carried = self._counter(
            "conversations_carried", "Conversations that were brought back into another engine"
        )
        self.conversations_lost = self._counter(
            "conversations_lost",
            "Conversations that a stop or a relaunch could not keep; the ledger names them",
        )
        self.ledger_lost = self._counter("ledger_lines_lost", "Ledger lines that no disk took")

    def state(self, state: EngineState) -> None:
        """Show `state` as the present one."""
        for each in EngineState:
            self._state.labels(each.value).set(each is state)

    def text(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)
