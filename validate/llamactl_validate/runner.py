"""Runs scenarios after each other, and says of each what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import httpx
import psutil
from llamactl_supervisor.errors import LlamactlError

from llamactl_validate.expecting import Failed, NotReproducible, Skipped, undisguised
from llamactl_validate.scenario import Measured, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from llamactl_validate.scenario import Engines, Scale, Scenario


BEFORE_A_STEP = "before its first step"
"""Where an interrupt met a scenario that had told of none."""


class Verdict(StrEnum):
    """What came of a scenario."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    NOT_REPRODUCIBLE = "not reproducible"
    INTERRUPTED = "interrupted"
    """Not run, or not to its end."""


@dataclass(frozen=True)
class Row:
    """One scenario's line of the report."""

    scenario: Scenario
    verdict: Verdict
    why: str
    """Of what did not pass: what was found, and at which step; nothing of what never began."""
    measured: tuple[Measured, ...]
    took_s: float


def run(
    scenarios: Iterable[Scenario],
    engines: Engines,
    scale: Scale,
    told: Callable[[Scenario, str], None],
) -> Generator[Row, None, None]:
    """Yield a row for each scenario when it has ended; `told` is called with every step of it.

    The row of the one that is interrupted is the last.
    """
    try:
        for scenario in scenarios:
            row = _row(scenario, engines, scale, told)
            yield row
            if row.verdict is Verdict.INTERRUPTED:
                break
    finally:
        _close(engines)


def _row(
    scenario: Scenario,
    engines: Engines,
    scale: Scale,
    told: Callable[[Scenario, str], None],
) -> Row:
    trial = Trial(engines, scale, lambda step: told(scenario, step), scenario.slot_tokens)
    began = time.monotonic()
    try:
        verdict, why = _decided(scenario, trial)
    except KeyboardInterrupt:
        verdict, why = Verdict.INTERRUPTED, trial.step or BEFORE_A_STEP
    took_s = time.monotonic() - began
    return Row(scenario, verdict, why, tuple(trial.measured), took_s)


def _decided(scenario: Scenario, trial: Trial) -> tuple[Verdict, str]:
    """Run it, and where that is not reproducible what is compared instead."""
    verdict, why = _judged(scenario.run, trial)
    if verdict is Verdict.NOT_REPRODUCIBLE and scenario.instead is not None:
        otherwise, found = _judged(scenario.instead, trial)
        if otherwise is Verdict.FAILED:
            return otherwise, found
        why = f"{why}; the bytes of the states are the same after the changes"
    return verdict, why


def _judged(run: Callable[[Trial], None], trial: Trial) -> tuple[Verdict, str]:
    """Run it once; an engine that dies or hangs is a failure like any other."""
    try:
        with undisguised():
            run(trial)
        return Verdict.PASSED, ""
    except Skipped as exc:
        return Verdict.SKIPPED, str(exc)
    except NotReproducible as exc:
        return Verdict.NOT_REPRODUCIBLE, str(exc)
    except Failed as exc:
        # An engine that ended is why whatever followed was not as it should be.
        return Verdict.FAILED, _at(trial, str(exc))
    except LlamactlError as exc:
        return Verdict.FAILED, _at(trial, f"{exc.code}: {exc.message}")
    except psutil.NoSuchProcess as exc:
        return Verdict.FAILED, _at(trial, f"it had ended before: {exc}")
    except (httpx.HTTPError, OSError, TimeoutError) as exc:
        what = f"the engine does not answer ({type(exc).__name__}: {exc})"
        return Verdict.FAILED, _at(trial, what)
    except (KeyError, ValueError, TypeError, LookupError) as exc:
        what = f"the engine's answer makes no sense ({type(exc).__name__}: {exc})"
        return Verdict.FAILED, _at(trial, what)


def _at(trial: Trial, what: str) -> str:
    """Return the step and what failed there; first of all the engine's end, if it had ended."""
    why = _close(trial.engines) or what
    return f"{trial.step}: {why}" if trial.step else why


def _close(engines: Engines) -> str:
    """End the engine; return how it had ended by itself, or nothing."""
    try:
        engines.close()
    except Failed as exc:
        return str(exc)
    return ""
