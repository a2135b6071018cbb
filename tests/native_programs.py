"""The C++ programs of tests/native: what they are linked with; each source is compiled once."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from llamactl_builder import paths, pin, source, toolchain
from llamactl_builder.errors import ToolError

if TYPE_CHECKING:
    from collections.abc import Sequence

NATIVE = Path(__file__).parent / "native"
OVERLAY = Path(__file__).parents[1] / "patches/overlay/tools/server"
CASE = re.compile(r"^TEST\((\w+)\)", re.MULTILINE)
SOURCES = re.compile(r"// sources:((?: [\w.*-]+)+)\n")
SYSTEMS = "posix", "win32"
WARNINGS = "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"
SANITIZED = "-fsanitize=address,undefined", "-fno-sanitize-recover=all"


@dataclass(frozen=True)
class Target:
    """A system that programs are compiled for, and how."""

    system: str
    compiler: toolchain.Compiler
    flags: tuple[str, ...]
    suffix: str = ""


def find_target(system: str, compiler: str, *flags: str, suffix: str = "") -> Target:
    """Return a target with a compiler of this name, or skip the test where there is none."""
    try:
        found = toolchain.find_compiler("CXX", [f"-DCMAKE_CXX_COMPILER={compiler}"])
    except ToolError as error:
        pytest.skip(error.message)
    return Target(system, found, flags, suffix)


def host() -> Target:
    """Return what programs are compiled for that run here."""
    flags = (*WARNINGS, *SANITIZED, "-pthread")
    return Target("posix", toolchain.find_compiler("CXX"), flags)


def cases(system: str) -> list[object]:
    """Return the cases of all test programs that can be linked for a system, as parameters."""
    return [
        pytest.param(path, name, id=f"{path.stem}:{name}")
        for path in sorted(NATIVE.glob("test-*.cpp"))
        if _is_for(system, path)
        for name in CASE.findall(path.read_text())
    ]


def _names(program: Path) -> list[str]:
    """Return the names of a program's other sources; `*` stands for the system."""
    found = SOURCES.match(program.read_text())
    assert found, f"{program} must open with a line `// sources: NAME.cpp ...`"
    return found[1].split()


def _is_for(system: str, program: Path) -> bool:
    """Whether a program names a source of this system, or one of each; pure ones are run here."""
    named = " ".join(_names(program))
    systems = [each for each in SYSTEMS if f"-{each}.cpp" in named]
    return "-*.cpp" in named or system in (systems or ["posix"])


def sources(program: Path, system: str) -> list[Path]:
    """Return all that a program is compiled of."""
    names = [name.replace("*", system) for name in _names(program)]
    places = [NATIVE / name for name in names]
    return [program, *(p if p.is_file() else OVERLAY / p.name for p in places)]


@functools.cache
def vendor() -> Path:
    """What upstream carries of other projects; sources include it from there."""
    patches = paths.patches_dir()
    return source.fetch(pin.load(patches), patches) / "vendor"


def built(program: Path, target: Target) -> Path:
    """The program; what it is linked of is compiled once for all programs that share it."""
    compiled = sources(program, target.system)
    made = _place(program, compiled, target, target.suffix)
    if not made.exists():
        vendor()  # not fetched by two threads
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(functools.partial(_object, target), compiled))
        _make(made, target, *objects)
    return made


def _object(target: Target, path: Path) -> Path:
    """The object file of one source."""
    made = _place(path, [path], target, ".o")
    if not made.exists():
        _make(made, target, "-c", path)
    return made


def _flags(target: Target) -> tuple[str, ...]:
    return (*target.flags, f"-I{OVERLAY}", f"-I{NATIVE}")


def _place(path: Path, compiled: Sequence[Path], target: Target, suffix: str) -> Path:
    """Where it is kept: one place for a content of it, the headers, flags and compiler."""
    key = hashlib.sha256(repr((_flags(target), target.compiler)).encode())
    for each in (*sorted([*OVERLAY.glob("*.h"), *NATIVE.glob("*.h")]), *compiled):
        key.update(each.read_bytes())
    return paths.cache_dir() / "native-tests" / f"{path.stem}-{key.hexdigest()[:16]}{suffix}"


def _make(made: Path, target: Target, *words: str | Path) -> None:
    """Compile or link it beside its place; it appears whole or not at all."""
    made.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        new = Path(scratch) / made.name
        toolchain.run(
            *(target.compiler.path, *_flags(target), "-isystem", str(vendor())),
            *(*map(str, words), "-o", str(new)),
        )
        new.rename(made)
