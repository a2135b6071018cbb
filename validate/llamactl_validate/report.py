"""What came of a validation: a table with one line of verdict, JSON, and JUnit's XML."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from llamactl_validate.runner import Verdict

if TYPE_CHECKING:
    from llamactl_validate.preflight import Plan
    from llamactl_validate.runner import Row
    from llamactl_validate.scenario import Scale

_NOT_IN_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Report:
    """Of one run on one model."""

    model: str
    engine: str
    scale: Scale
    rows: tuple[Row, ...]
    took_s: float
    plan: Plan | None = None
    """What it was to take; None where an engine that runs already was looked at."""

    @property
    def verdict(self) -> Verdict:
        """Interrupted, else failed where anything has; no success where nothing was shown."""
        found = Counter(row.verdict for row in self.rows)
        if found[Verdict.INTERRUPTED]:
            return Verdict.INTERRUPTED
        if found[Verdict.FAILED]:
            return Verdict.FAILED
        if found[Verdict.PASSED]:
            return Verdict.PASSED
        return Verdict.NOT_REPRODUCIBLE if found[Verdict.NOT_REPRODUCIBLE] else Verdict.SKIPPED

    @property
    def shows_nothing(self) -> bool:
        """Whether every scenario was skipped: that proves nothing."""
        return self.verdict is Verdict.SKIPPED

    @property
    def counts(self) -> dict[str, int]:
        """How many scenarios have each verdict."""
        return {each.value: sum(row.verdict is each for row in self.rows) for each in Verdict}

    def data(self) -> dict[str, Any]:
        """Return everything, for a script."""
        return {
            "verdict": self.verdict.value,
            "counts": self.counts,
            "model": self.model,
            "engine": self.engine,
            "scale": self.scale.value,
            "planned": None if self.plan is None else self.plan.data(),
            "took_s": round(self.took_s, 3),
            "scenarios": [_data(row) for row in self.rows],
        }

    def junit(self) -> bytes:
        """Return the report as JUnit's XML, by whose words an interrupted run is no good one.

        What was under way is an error; else what neither passed nor failed counts as skipped.
        """
        counts, n_cut = self.counts, sum(map(_was_cut, self.rows))
        n_skipped = len(self.rows) - counts[Verdict.PASSED] - counts[Verdict.FAILED] - n_cut
        told = {
            "name": "llamactl validate",
            "tests": str(len(self.rows)),
            "failures": str(counts[Verdict.FAILED]),
            "errors": str(n_cut),
            "skipped": str(n_skipped),
            "time": f"{self.took_s:.3f}",
        }
        suite = ElementTree.Element("testsuite", told)
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in (("model", self.model), ("engine", self.engine), ("scale", self.scale)):
            ElementTree.SubElement(properties, "property", name=name, value=_xml(value))
        for row in self.rows:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"validate.{row.scenario.suite}",
                name=row.scenario.name,
                time=f"{row.took_s:.3f}",
            )
            if row.verdict is Verdict.FAILED:
                failure = ElementTree.SubElement(case, "failure", message=_xml(row.why))
                failure.text = _xml(row.scenario.title)
            elif row.verdict is not Verdict.PASSED:
                message = _xml(": ".join(filter(None, (row.verdict, row.why))))
                kind = "error" if _was_cut(row) else "skipped"
                ElementTree.SubElement(case, kind, message=message)
            if row.measured:
                out = ElementTree.SubElement(case, "system-out")
                out.text = _xml("\n".join(map(str, row.measured)))
        written: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
        return written


def _was_cut(row: Row) -> bool:
    """Whether it was interrupted, as the one that an interrupt met."""
    return row.verdict is Verdict.INTERRUPTED and row.why != ""


def _data(row: Row) -> dict[str, Any]:
    return {
        "scenario": row.scenario.id,
        "title": row.scenario.title,
        "verdict": row.verdict.value,
        "why": row.why or None,
        "measured": [asdict(each) for each in row.measured],
        "took_s": round(row.took_s, 3),
    }


def _xml(text: str) -> str:
    """Return the text with what XML cannot hold written out."""
    return _NOT_IN_XML.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
