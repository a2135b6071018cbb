"""The overlay's own C++ tests, each case of tests/native/test-*.cpp as one test."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import native_programs
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("test", "name"), native_programs.cases("posix"))
def test_native(test: Path, name: str) -> None:
    done = subprocess.run(
        [native_programs.built(test, native_programs.host()), name],
        capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"UBSAN_OPTIONS": "print_stacktrace=1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
