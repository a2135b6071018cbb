"""The scenarios, one module for each suite, in the order in which they run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from llamactl_validate.scenario import registered

if TYPE_CHECKING:
    from llamactl_validate.scenario import Scenario

SUITES = (
    "identity",
    "cycles",
    "queueing",
    "parking",
    "pages",
    "isolation",
    "durability",
    "refusals",
    "supervision",
)


def scenarios() -> list[Scenario]:
    """Return every scenario, suite after suite."""
    for suite in SUITES:
        import_module(f"{__name__}.{suite}")
    return sorted(registered(), key=lambda each: SUITES.index(each.suite))
