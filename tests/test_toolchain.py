"""cmake and ninja for a machine that has neither."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING

import pytest
from llamactl_builder import toolchain
from llamactl_builder.errors import ToolError

if TYPE_CHECKING:
    from pathlib import Path

INFO = "ninja-1.99.dist-info"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages that is all pip can see; PATH holds nothing."""
    directory = tmp_path / "packages"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("LLAMACTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return directory


def write_ninja(directory: Path, inside: str) -> None:
    """A ninja package whose program is at the given place."""
    with zipfile.ZipFile(directory / "ninja-1.99-py3-none-any.whl", "w") as archive:
        script = zipfile.ZipInfo(inside)
        script.external_attr = 0o100755 << 16
        archive.writestr(script, "#!/bin/sh\necho 1.99\n")
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: ninja\nVersion: 1.99\n")
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", "")


@pytest.mark.parametrize("inside", ["ninja/data/bin/ninja", "ninja-1.99.data/scripts/ninja"])
def test_a_missing_tool_comes_from_its_package_once(packages: Path, inside: str) -> None:
    write_ninja(packages, inside)
    tool = toolchain.find_tool("ninja")
    assert toolchain.run(tool) == "1.99\n"
    next(packages.iterdir()).unlink()
    assert toolchain.find_tool("ninja") == tool


def test_a_tool_on_path_is_preferred(packages: Path, tmp_path: Path) -> None:
    assert list(packages.iterdir()) == []
    (tmp_path / "ninja").touch(mode=0o755)
    assert toolchain.find_tool("ninja") == os.fspath(tmp_path / "ninja")


def test_a_tool_that_cannot_be_had_says_how(packages: Path) -> None:
    assert list(packages.iterdir()) == []
    with pytest.raises(ToolError, match="ninja is not on PATH and its package") as caught:
        toolchain.find_tool("ninja")
    assert caught.value.code == "ninja_missing"
    assert caught.value.hint is not None
    assert "apt-get install cmake ninja-build" in caught.value.hint
