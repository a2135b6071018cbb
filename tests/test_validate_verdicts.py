"""What `llamactl validate` makes of a scenario that fails, and how it reports it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import httpx
import pytest
from llamactl_validate.expecting import NotReproducible, Skipped, expect, expect_that
from llamactl_validate.report import Report
from llamactl_validate.runner import Row, Verdict, run
from llamactl_validate.scenario import Engines, Measured, Scale, Scenario, Trial

if TYPE_CHECKING:
    from collections.abc import Callable

NOWHERE = Path("nowhere")


def scenario(
    run: Callable[[Trial], None], instead: Callable[[Trial], None] | None = None
) -> Scenario:
    return Scenario("one", "suite", "it holds", run, (1, 1), (0, 0), instead)


def judged(*scenarios: Scenario, engines: Engines | None = None) -> list[Row]:
    """Run these without an engine, unless one is given."""
    where = engines or Engines(NOWHERE, NOWHERE)
    return list(run(scenarios, where, Scale.QUICK, lambda *_: None))


def passes(trial: Trial) -> None:
    trial.measure("answers", 3)


def fails(trial: Trial) -> None:
    trial.now("the second step")
    expect("tokens", [1, 2], [1, 3])


def skips(_: Trial) -> None:
    raise Skipped("no such memory")


def differs(trial: Trial) -> None:
    trial.control(iter((1, 2)).__next__)


def test_each_verdict_says_why_and_nothing_stops_the_others() -> None:
    rows = judged(*map(scenario, (fails, skips, differs, passes)))
    assert [(row.verdict, row.why) for row in rows] == [
        (Verdict.FAILED, "the second step: tokens[1]: 2 instead of 3"),
        (Verdict.SKIPPED, "no such memory"),
        (Verdict.NOT_REPRODUCIBLE, "two control runs differ"),
        (Verdict.PASSED, ""),
    ]
    assert rows[-1].measured == (Measured("answers", 3, ""),)


def test_where_runs_differ_the_bytes_decide() -> None:
    alike, unlike = judged(scenario(differs, passes), scenario(differs, fails))
    assert alike.verdict is Verdict.NOT_REPRODUCIBLE
    assert "the bytes of the states are the same" in alike.why
    assert (unlike.verdict, unlike.why.partition(":")[0]) == (Verdict.FAILED, "the second step")


@pytest.mark.parametrize(
    ("exc", "said"),
    [
        (httpx.ReadTimeout("timed out"), "the engine does not answer (ReadTimeout: timed out)"),
        (KeyError("outcome"), "the engine's answer makes no sense (KeyError: 'outcome')"),
        (ValueError("no JSON"), "the engine's answer makes no sense (ValueError: no JSON)"),
    ],
)
def test_an_engine_that_hangs_or_babbles_fails_at_its_step(exc: Exception, said: str) -> None:
    def breaks(trial: Trial) -> None:
        trial.now("a change")
        raise exc

    (row,) = judged(scenario(breaks))
    assert (row.verdict, row.why) == (Verdict.FAILED, f"a change: {said}")


def test_an_interrupt_is_none_of_the_engine_s_failures() -> None:
    """The engine of a terminal's command has the same Ctrl-C, and what is cleaned up meets that."""

    def interrupted(_: Trial) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise httpx.ReadError("the engine is gone")

    (row,) = judged(scenario(interrupted), scenario(passes))
    assert (row.verdict, row.why) == (Verdict.INTERRUPTED, "before its first step")


def test_an_engine_that_dies_is_why_and_the_next_scenario_has_another(
    engine_path: Path, model_path: Path
) -> None:
    def dies(trial: Trial) -> None:
        with trial.engine() as live:
            trial.now("the kill")
            os.kill(live.process.pid, signal.SIGKILL)
            live.process.wait()
            expect_that("it answers", holds=False)

    def goes_on(trial: Trial) -> None:
        with trial.engine() as live:
            expect_that("the place is its own", live.place.path.stat().st_mode & 0o077 == 0)
            trial.measure("slots", len(live.slots()))

    engines = Engines(engine_path, model_path, idle=False)
    died, went_on = judged(scenario(dies), scenario(goes_on), engines=engines)
    assert died.verdict is Verdict.FAILED
    assert died.why.startswith("the kill: the engine ended with status -9: ")
    assert (went_on.verdict, went_on.measured) == (Verdict.PASSED, (Measured("slots", 2, ""),))


def report(*rows: Row) -> Report:
    return Report("a.gguf", "llama-server", Scale.QUICK, rows, 1.5)


@pytest.mark.parametrize(
    ("scenarios", "verdict"),
    [
        ((passes, fails, skips), Verdict.FAILED),
        ((passes, skips, differs), Verdict.PASSED),
        ((skips, differs), Verdict.NOT_REPRODUCIBLE),
        ((skips,), Verdict.SKIPPED),
        ((), Verdict.SKIPPED),
    ],
)
def test_one_failure_decides_and_nothing_shown_is_no_success(
    scenarios: tuple[Callable[[Trial], None], ...], verdict: Verdict
) -> None:
    assert report(*judged(*map(scenario, scenarios))).verdict is verdict


def test_junit_is_xml_whatever_the_engine_wrote() -> None:
    def writes(_: Trial) -> None:
        expect("the answer", "a\x00b\x1b[31m<&>\ud800", "")

    found = report(*judged(*map(scenario, (writes, skips, differs, passes))))
    suite = ElementTree.fromstring(found.junit())
    assert suite.attrib | {"tests": "4", "failures": "1", "skipped": "2"} == suite.attrib
    (failure,) = suite.iter("failure")
    assert "a\\x00b\\x1b[31m<&>\\ud800" in failure.attrib["message"]
    skipped = [each.attrib["message"] for each in suite.iter("skipped")]
    assert skipped == ["skipped: no such memory", "not reproducible: two control runs differ"]
    assert [each.text for each in suite.iter("system-out")] == ["answers 3"]


def test_what_an_interrupt_left_is_no_success_and_no_failure() -> None:
    cut = Row(scenario(passes), Verdict.INTERRUPTED, "cycle 7", (), 2.5)
    left = Row(scenario(passes), Verdict.INTERRUPTED, "", (), 0.0)
    found = report(*judged(scenario(passes), scenario(passes)), cut, left)
    assert found.verdict is Verdict.INTERRUPTED
    suite = ElementTree.fromstring(found.junit())
    counts = {"tests": "4", "failures": "0", "errors": "1", "skipped": "1"}
    assert suite.attrib | counts == suite.attrib
    assert [each.attrib["message"] for each in suite.iter("error")] == ["interrupted: cycle 7"]
    assert [each.attrib["message"] for each in suite.iter("skipped")] == ["interrupted"]
    assert suite.findall("testcase")[2].attrib["time"] == "2.500"


def test_the_json_says_the_same() -> None:
    said = json.loads(json.dumps(report(*judged(scenario(fails), scenario(passes))).data()))
    assert (said["verdict"], said["counts"]["failed"], said["counts"]["passed"]) == ("failed", 1, 1)
    first, second = said["scenarios"]
    assert (first["scenario"], first["verdict"]) == ("suite.one", "failed")
    assert second["measured"] == [{"name": "answers", "value": 3, "unit": ""}]


def test_two_equal_control_runs_are_one() -> None:
    trial = Trial(Engines(NOWHERE, NOWHERE))
    assert trial.control(lambda: 7) == 7
    with pytest.raises(NotReproducible):
        trial.control(iter((1, 2)).__next__)
