"""The overlay's own C++ tests, one test for each case, and the header whose table names them."""

from __future__ import annotations

import os
import re
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


def test_the_failures_that_page_files_survive_are_those_that_are_tested() -> None:
    """The table in the header names a test for each row, and each of them is there."""
    header = (native_programs.OVERLAY / "server-page-files.h").read_text()
    rows = re.findall(r"^//   [^|\n]+\|[^|\n]+\|[^|\n]+\| (\w+)$", header, re.MULTILINE)
    programs = native_programs.NATIVE.glob("test-*.cpp")
    tests = {name for path in programs for name in native_programs.CASE.findall(path.read_text())}
    assert len(rows) > 20
    assert set(rows[1:]) <= tests
