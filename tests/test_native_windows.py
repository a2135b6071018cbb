"""The C++ tests that make sense on Windows, compiled for it and run by wine."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import native_programs
import pytest
from llamactl_builder import lock, paths
from llamactl_builder.progress import silent

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = "x86_64-w64-mingw32-g++-posix"
COMPILER_PACKAGE = "g++-mingw-w64-x86-64-posix"


@pytest.fixture(scope="module")
def target() -> native_programs.Target:
    if not shutil.which(COMPILER):
        pytest.skip(f"no compiler for Windows: install {COMPILER_PACKAGE} (Debian, Ubuntu)")
    flags = (*native_programs.WARNINGS, "-static")
    return native_programs.find_target("win32", COMPILER, *flags, suffix=".exe")


@pytest.fixture(scope="module")
def wine() -> dict[str, str]:
    """The environment of a wine that has made its directory, without a screen or a word."""
    if not shutil.which("wine"):
        pytest.skip("nothing runs programs for Windows here: install wine (Debian, Ubuntu)")
    prefix = paths.cache_dir() / "wine"
    variables = {"WINEPREFIX": str(prefix), "WINEDEBUG": "-all"}
    # It would ask on a screen whether to fetch what these need.
    env = os.environ | variables | {"WINEDLLOVERRIDES": "mscoree,mshtml="}
    with lock.held(paths.cache_dir() / ".wine.lock", "making wine's directory", silent):
        if not (prefix / "system.reg").is_file():
            for words in (["wine", "wineboot", "--init"], ["wineserver", "--wait"]):
                done = subprocess.run(
                    words, env=env, capture_output=True, text=True, check=False, timeout=300
                )
                assert done.returncode == 0, done.stderr
    return env


@pytest.mark.parametrize(("test", "name"), native_programs.cases("win32"))
def test_native(
    target: native_programs.Target, wine: dict[str, str], test: Path, name: str
) -> None:
    done = subprocess.run(
        ["wine", native_programs.built(test, target), name],
        capture_output=True, text=True, check=False, timeout=300, env=wine,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
