"""What is published says what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from llamactl_supervisor import describe

DOCS = Path(__file__).parents[1] / "docs"
PANELS = [
    *("state", "pause", "avoided", "tokens per second", "slots", "kv cells", "pages", "memory"),
    "crashes",
]


@pytest.mark.parametrize(("what", "name"), [("openapi", "openapi.json"), ("metrics", "metrics.md")])
def test_the_published_file_is_up_to_date(what: str, name: str) -> None:
    command = [sys.executable, "-m", "llamactl_supervisor", "describe", what]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert said == (DOCS / name).read_text(), f"python -m llamactl_supervisor describe {what}"


def test_every_route_documents_its_errors() -> None:
    document = json.loads(describe.openapi())
    refused = {"schema": {"$ref": "#/components/schemas/Problem"}}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status in ("4XX", "5XX"):
                content = operation["responses"][status]["content"]
                assert content == {"application/problem+json": refused}, path
            assert operation["security"] == [{"token": []}], path
            assert "422" not in operation["responses"], path
    assert "- `insufficient_memory` 409" in document["info"]["description"]


def sample_names() -> set[str]:
    """Return every name that a scrape may hold, those of a histogram's parts too."""
    names = set()
    for name, kind, _ in describe.rows():
        plain = name.partition("{")[0]
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {plain + part for part in parts}
    return names


def test_the_dashboard_uses_only_what_there_is() -> None:
    text = (DOCS / "grafana-dashboard.json").read_text()
    used = set(re.findall(r"\b(?:llamactl_|llamacpp:)\w+", text))
    assert used
    assert used - sample_names() == set()


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
