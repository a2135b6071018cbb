"""Fixtures that more than one test file needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from upstream_fixture import make_upstream

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny upstream; copy it before changing anything."""
    root = tmp_path_factory.mktemp("upstream")
    make_upstream(root)
    return root
