"""What is published about the daemon, from its code: the control API and the metrics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

from llamactl_supervisor import describe_api
from llamactl_supervisor.control import create_app
from llamactl_supervisor.engine_metrics import ENGINE_METRICS, PREFIX, WITH_DRAFT
from llamactl_supervisor.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from llamactl_supervisor.control import Supervisor

API_VERSION = "1"
_METRICS_HEAD = """\
# Metrics

`GET /metrics` answers all of them in one scrape. `llamactl_` are the daemon's; `llamacpp:` are the
engine's own, which is asked only when the daemon is, and are missing where
`llamactl_engine_scrape_ok` is 0. The engine's counters and histograms go on over its restarts;
everything but the two sums "over all daemons" begins anew with the daemon. No label holds what a
user typed.

Generated: `make docs`.

| metric | type | |
|---|---|---|
"""


def openapi() -> str:
    """Return the description of the control API as JSON."""
    nobody = cast("Supervisor", None)  # no handler runs
    return json.dumps(create_app(nobody, API_VERSION).openapi(), indent=2) + "\n"


def api() -> str:
    """Return the same as a document in Markdown."""
    return describe_api.document(json.loads(openapi()))


def metrics() -> str:
    """Return the metrics as a table in Markdown."""
    return _METRICS_HEAD + "".join(
        f"| `{name}` | {kind} | {text} |\n" for name, kind, text in sorted(rows())
    )


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield name with labels, type and help of every metric."""
    for family in Metrics().registry.collect():
        yield _name(family), family.type, family.documentation
    for metric in ENGINE_METRICS:
        labels = "{position}" if metric.name == WITH_DRAFT else ""
        yield f"{PREFIX}{metric.name}{labels}", metric.type, metric.help


def _name(family: Metric) -> str:
    labels = {name for sample in family.samples for name in sample.labels} - {"le"}
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return f"{name}{{{','.join(sorted(labels))}}}" if labels else name
