"""Every scenario of `llamactl validate` on the default model, at full length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from llamactl_validate.expecting import Skipped
from llamactl_validate.scenario import Engines, Scale, Scenario, Trial
from llamactl_validate.suites import scenarios

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def engines(engine_path: Path, model_path: Path) -> Iterator[Engines]:
    shared = Engines(engine_path, model_path, idle=False)
    yield shared
    shared.close()


# An engine that is killed refuses, and httpcore does not close a socket that was refused.
@pytest.mark.filterwarnings("ignore:unclosed <socket.* family=1,:ResourceWarning")
@pytest.mark.parametrize("scenario", [pytest.param(each, id=each.id) for each in scenarios()])
def test_it_holds(
    engines: Engines, scenario: Scenario, record_property: Callable[[str, object], None]
) -> None:
    trial = Trial(engines, Scale.FULL)
    try:
        scenario.run(trial)
    except Skipped as exc:
        pytest.skip(str(exc))
    except BaseException as exc:
        exc.add_note(f"at the step: {trial.step}")
        engines.close()
        raise
    assert trial.measured
    record_property("measured", ", ".join(map(str, trial.measured)))
