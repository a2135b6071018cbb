"""Fixtures that more than one test file needs."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from llamactl_builder import build, models
from llamactl_builder.progress import TerminalProgress
from tiny_models import TinyModels, ensure
from upstream_fixture import make_upstream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# A shell that starts a job in the background has it ignore SIGINT, and so would every program that
# a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def shown_progress(request: pytest.FixtureRequest) -> Iterator[TerminalProgress]:
    """Yield a progress that the terminal shows; what takes minutes must not look hung."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled(), TerminalProgress() as progress:
        yield progress


@pytest.fixture(scope="session")
def engine_path(request: pytest.FixtureRequest) -> Path:
    """The patched llama-server, built if it is not in the cache."""
    with shown_progress(request) as progress:
        return build.ensure_engine(progress=progress).path


@pytest.fixture(scope="session")
def tools_dir(request: pytest.FixtureRequest) -> Path:
    """The directory of the engine's own test programs, built if they are not in the cache."""
    with shown_progress(request) as progress:
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
    with shown_progress(request) as progress:
        return models.ensure_default_model(progress)


@pytest.fixture(scope="session")
def tiny_upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny upstream; copy it before changing anything."""
    root = tmp_path_factory.mktemp("upstream")
    make_upstream(root)
    return root
