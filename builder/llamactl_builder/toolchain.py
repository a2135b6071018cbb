"""The programs a build needs: compilers from the machine, cmake and ninja from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_builder import paths, pip
from llamactl_builder.errors import ToolError
from llamactl_builder.progress import Progress, ProgressCallback, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

# Below these upstream's CMake files do not configure; above them anything works.
PACKAGES = {"cmake": "cmake>=3.28,<5", "ninja": "ninja>=1.11"}
# Inside the packages the program is the one file at one of these places.
PLACES = ("{0}/data/bin/{0}", "bin/{0}")
COMPILERS = {"C": ("CC", ("cc", "gcc", "clang")), "CXX": ("CXX", ("c++", "g++", "clang++"))}


@dataclass(frozen=True)
class Compiler:
    """One compiler, and what it says about itself."""

    path: str
    identity: str


def find_compiler(language: str, cmake_args: Sequence[str] = ()) -> Compiler:
    """The compiler CMake will use: -DCMAKE_<language>_COMPILER, the environment, or the usual."""
    variable, usual = COMPILERS[language]
    chosen = os.environ.get(variable, "")
    for arg in cmake_args:
        if arg.startswith(f"-DCMAKE_{language}_COMPILER="):
            chosen = arg.partition("=")[2]
    names = (chosen,) if chosen else usual
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        raise ToolError(
            "compiler_missing",
            f"No {language.replace('CXX', 'C++')} compiler: {' / '.join(names)} is not on PATH.",
            f"Install one (Debian, Ubuntu: apt-get install g++), or set {variable}.",
        )
    try:
        said = run(path, "--version").splitlines()[0]
        machine = run(path, "-dumpmachine").strip()
    except (ToolError, IndexError) as error:
        raise ToolError(
            "compiler_broken", f"{path} does not answer --version and -dumpmachine: {error}"
        ) from error
    return Compiler(path, f"{path}: {said} ({machine})")


def find_tool(name: str, progress: ProgressCallback = silent) -> str:
    """cmake or ninja: from PATH, else out of its Python package in a directory of our own."""
    if found := shutil.which(name):
        return found
    home = paths.cache_dir() / "tools" / name
    if not (tool := _inside(home, name)):
        progress(Progress(f"fetching {name}, which this machine does not have"))
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix=".install-") as scratch:
            made = Path(scratch) / name
            try:
                pip.install([PACKAGES[name]], made)
            except ToolError as error:
                raise ToolError(
                    f"{name}_missing",
                    f"{name} is not on PATH and its package cannot be had: {error.message}",
                    "Install it (Debian, Ubuntu: apt-get install cmake ninja-build).",
                ) from error
            shutil.rmtree(home, ignore_errors=True)
            made.rename(home)
        tool = _inside(home, name)
    if not tool:
        raise ToolError(f"{name}_missing", f"The package {PACKAGES[name]} holds no {name} program.")
    return str(tool)


def _inside(home: Path, name: str) -> Path | None:
    return next((home / p.format(name) for p in PLACES if (home / p.format(name)).is_file()), None)


def run(*command: str) -> str:
    """Run a short command, both streams together, or raise with what it said."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", check=False, env=os.environ | {"LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode:
        raise ToolError(
            "tool_failed",
            f"{' '.join(command)} ended with {done.returncode}: {done.stdout.strip()}",
        )
    return done.stdout
