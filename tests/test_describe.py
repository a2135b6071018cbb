"""What is published says what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from llamactl_supervisor import describe
from llamactl_supervisor.models import EngineState

DOCS = Path(__file__).parents[1] / "docs"
PUBLISHED = [
    ("llamactl_supervisor describe openapi", "openapi.json"),
    ("llamactl_supervisor describe api", "control-api.md"),
    ("llamactl_supervisor describe metrics", "metrics.md"),
    ("llamactl_cli config docs", "configuration.md"),
]
PANELS = [
    *("state", "pause", "avoided", "tokens per second", "slots", "kv cells", "pages", "memory"),
    "crashes",
]


@pytest.mark.parametrize(("words", "name"), PUBLISHED)
def test_the_published_file_is_up_to_date(words: str, name: str) -> None:
    command = [sys.executable, "-m", *words.split()]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert said == (DOCS / name).read_text(), f"make docs: {name} is not what the code says"


def test_make_docs_writes_what_is_held_here() -> None:
    makefile = (DOCS.parent / "Makefile").read_text()
    written = re.findall(r"^\t\$\(BIN\)/python -m (.*) > docs/(\S+)$", makefile, re.MULTILINE)
    assert sorted(written) == sorted(PUBLISHED)


def test_every_route_documents_its_errors() -> None:
    document = json.loads(describe.openapi())
    refused = {"schema": {"$ref": "#/components/schemas/Problem"}}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status in ("400", "401", "500"):
                content = operation["responses"][status]["content"]
                assert content == {"application/problem+json": refused}, path
            assert operation["security"] == [{"token": []}], path
            assert "422" not in operation["responses"], path
    assert "- `insufficient_memory` 409" in document["info"]["description"]
    stop, status = document["paths"]["/v1/stop"]["post"], document["paths"]["/v1/status"]["get"]
    assert stop["responses"]["409"]["description"] == "`owned`, `request_expired`"
    assert "409" not in status["responses"]


def sample_names() -> set[str]:
    """Return every name that a scrape may hold, those of a histogram's parts too."""
    names = set()
    for name, kind, _ in describe.rows():
        plain = name.partition("{")[0]
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {plain + part for part in parts}
    return names


@pytest.mark.parametrize("name", ["grafana-dashboard.json", "alerts.yaml"])
def test_dashboard_and_alerts_use_only_what_there_is(name: str) -> None:
    text = (DOCS / name).read_text()
    used = set(re.findall(r"\b(?:llamactl_|llamacpp:)\w+", text))
    assert used
    assert used - sample_names() == set()


def test_every_alert_is_a_rule_that_says_what_to_look_at() -> None:
    [group] = yaml.safe_load((DOCS / "alerts.yaml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) > 0
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "annotations"}
        assert rule["expr"]
        assert rule["annotations"]["summary"].endswith(".")
    states = set(re.findall(r'state=~?"([a-z|]+)"', str(group)))
    assert set("|".join(states).split("|")) <= set(EngineState)


def test_the_dashboard_shows_what_an_operator_asks_for() -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    titles = [panel["title"].lower() for panel in panels]
    assert [topic for topic in PANELS if not any(topic in title for title in titles)] == []
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels lie on each other"
    assert all(target["expr"] for panel in panels for target in panel["targets"])
