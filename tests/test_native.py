"""The overlay's own C++ tests, each case of tests/native/test-*.cpp as one test."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from llamactl_builder import paths, pin, source, toolchain

NATIVE = Path(__file__).parent / "native"
OVERLAY = Path(__file__).parents[1] / "patches/overlay/tools/server"
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *("-pthread", f"-I{OVERLAY}", f"-I{NATIVE}"),
)
CASE = re.compile(r"^TEST\((\w+)\)", re.MULTILINE)
SOURCES = re.compile(r"// sources:((?: [\w.-]+)+)\n")
CASES = [
    pytest.param(path, name, id=f"{path.stem}:{name}")
    for path in sorted(NATIVE.glob("test-*.cpp"))
    for name in CASE.findall(path.read_text())
]


@functools.cache
def vendor() -> Path:
    """What upstream carries of other projects; sources include it from there."""
    patches = paths.patches_dir()
    return source.fetch(pin.load(patches), patches) / "vendor"


def built(test: Path) -> Path:
    """The test program, compiled once for a content of test, overlay, flags and compiler."""
    found = SOURCES.match(test.read_text())
    assert found, f"{test} must open with a line `// sources: NAME.cpp ...`"
    sources = [test, *(OVERLAY / name for name in found[1].split())]
    compiler = toolchain.find_compiler("CXX")
    key = hashlib.sha256(repr((FLAGS, compiler)).encode())
    for path in (test, *sorted([*OVERLAY.glob("*.h"), *NATIVE.glob("*.h")]), *sources):
        key.update(path.read_bytes())
    program = paths.cache_dir() / "native-tests" / f"{test.stem}-{key.hexdigest()[:16]}"
    if not program.exists():
        program.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
            made = Path(scratch) / "program"
            toolchain.run(
                *(compiler.path, *FLAGS, "-isystem", str(vendor()), *map(str, sources)),
                *("-o", str(made)),
            )
            made.rename(program)
    return program


@pytest.mark.parametrize(("test", "name"), CASES)
def test_native(test: Path, name: str) -> None:
    done = subprocess.run(
        [built(test), name], capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"UBSAN_OPTIONS": "print_stacktrace=1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_failures_that_page_files_survive_are_those_that_are_tested() -> None:
    """The table in the header names a test for each row, and each of them is there."""
    header = (OVERLAY / "server-page-files.h").read_text()
    rows = re.findall(r"^//   [^|\n]+\|[^|\n]+\|[^|\n]+\| (\w+)$", header, re.MULTILINE)
    tests = {name for path in NATIVE.glob("test-*.cpp") for name in CASE.findall(path.read_text())}
    assert len(rows) > 20
    assert set(rows[1:]) <= tests
