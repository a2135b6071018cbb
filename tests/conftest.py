"""What a run of tests goes by: its stage, its workers, and the fixtures of more than one file."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from llamactl_builder import build, models
from llamactl_builder.errors import BuilderError
from llamactl_builder.progress import TerminalProgress
from llamactl_validate import ports
from stages import NEEDS_AN_ENGINE, Stage
from tiny_models import TinyModels, ensure
from upstream_fixture import make_upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.fixtures import SubRequest

# How long one example takes is the machine's doing, not the code's.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")

# A shell that starts a job in the background has it ignore SIGINT, nohup SIGHUP, and so would every
# program that a test starts and signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tests start commands and daemons by the hundred. Where no bytecode may be written, and none is
# there yet, each start compiles all modules again: 2.2 s of processor time instead of 0.8 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The python3 that programs of tests ask for: one that a version manager starts takes ten times as
# long to be there.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

MEASURED = "measured"
"""The property of a test that says what it has measured."""
CHANGING = {"PYTEST_CURRENT_TEST", "PYDANTIC_DISABLE_PLUGINS"}
"""Variables that are pytest's to change, and what the command sets for good in its own process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--stage`: the tests of one stage of `make test`."""
    help_ = "run the tests of this stage only"
    parser.addoption("--stage", type=Stage, choices=list(Stage), help=help_)


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker ports of its own: one that is free may be about to be another's."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker:
        number, (first, end) = int(worker["workerid"].removeprefix("gw")), ports.FREE_PORTS
        share = (end - first) // int(worker["workercount"])
        ports.FREE_PORTS = (first + number * share, first + (number + 1) * share)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Build before tests begin: workers would not show it, and no test has so many minutes."""
    config = session.config
    stage: Stage | None = config.getoption("stage")
    is_asked = stage in {Stage.ENGINE, Stage.DOCS} and not config.option.collectonly
    if not is_asked or hasattr(config, "workerinput"):
        return
    try:
        with shown_progress(config) as progress:
            build.ensure_engine(progress=progress)
            models.ensure_default_model(progress)
            if stage == Stage.ENGINE:
                ensure(lambda: build.ensure_test_tools(progress=progress).directory)
    except BuilderError as exc:
        pytest.exit(f"there is no engine to test: {exc}", returncode=1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell what tests have measured: it is no verdict, and worth a look."""
    told = [
        f"{report.nodeid}: {value}"
        for report in terminalreporter.stats.get("passed", ())
        for name, value in report.user_properties
        if name == MEASURED and report.when == "call"
    ]
    if told:
        terminalreporter.section(MEASURED)
        terminalreporter.write_line("\n".join(told))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what has no test of the stage: schemathesis alone collects for seconds."""
    stage: Stage | None = config.getoption("stage")
    is_other = stage and collection_path.suffix == ".py" and not stage.may_be_in(collection_path)
    return is_other or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the stage."""
    stage: Stage | None = config.getoption("stage")
    if stage:
        ours: list[pytest.Item] = []
        others: list[pytest.Item] = []
        for item in items:
            its = Stage.of(item.path, getattr(item, "fixturenames", ()))
            (ours if its == stage else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = ours


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: SubRequest) -> None:
    """Fail a test that gets an engine behind the back of its stage, which may have none."""
    stage: Stage | None = request.config.getoption("stage")
    if stage in {Stage.NATIVE, Stage.PYTHON} and fixturedef.argname in NEEDS_AN_ENGINE:
        name = fixturedef.argname
        pytest.fail(f"{name} is for another stage: name it, @pytest.mark.usefixtures({name!r})")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Fail a test that leaves the environment otherwise: a later one would be told by it."""
    before = dict(os.environ)
    yield
    left = {name for name, _ in before.items() ^ os.environ.items()} - CHANGING
    assert not left, f"the test leaves {sorted(left)} changed"


@contextmanager
def shown_progress(config: pytest.Config) -> Iterator[TerminalProgress]:
    """Yield a progress that the terminal shows; what takes minutes must not look hung."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled(), TerminalProgress() as progress:
        yield progress


@pytest.fixture(scope="session")
def engine_path(request: pytest.FixtureRequest) -> Path:
    """The patched llama-server, built if it is not in the cache."""
    with shown_progress(request.config) as progress:
        return build.ensure_engine(progress=progress).path


@pytest.fixture(scope="session")
def tools_dir(request: pytest.FixtureRequest) -> Path:
    """The directory of the engine's own test programs, built if they are not in the cache."""
    with shown_progress(request.config) as progress:
        return build.ensure_test_tools(progress=progress).directory


@pytest.fixture(scope="session")
def tiny(request: pytest.FixtureRequest) -> TinyModels:
    """The tiny models, made if they are not in the cache."""

    def tools() -> Path:
        directory: Path = request.getfixturevalue("tools_dir")
        return directory

    return ensure(tools)


@pytest.fixture(scope="session")
def model_path(request: pytest.FixtureRequest) -> Path:
    """The default model, fetched if it is not in the cache."""
    with shown_progress(request.config) as progress:
        return models.ensure_default_model(progress)


@pytest.fixture(scope="session")
def tiny_upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny upstream; copy it before changing anything."""
    root = tmp_path_factory.mktemp("upstream")
    make_upstream(root)
    return root
