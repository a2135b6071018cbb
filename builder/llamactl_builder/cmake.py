"""Configures and compiles the engine and its test programs, reporting ninja's own count."""

from __future__ import annotations

import os
import re
import subprocess
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_builder.errors import BuildError
from llamactl_builder.progress import Progress, ProgressCallback

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TARGET = "llama-server"
PATCHED_TARGETS = ("llama-page-files",)
"""Programs of the patch set that are installed beside the patched engine."""
TEST_TARGETS = ("test-llama-archs", "llama-server-faults")
"""Programs of the same build that tests need; nothing else builds them."""
STATUS = re.compile(r"\[(\d+)/(\d+)\] ")
TAIL_LINES = 30
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=ON",  # configured only: a target is built when it is named
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DGGML_NATIVE=ON",
)


@dataclass(frozen=True)
class CMake:
    """One work directory (`src` and `build` inside) and the programs that work on it."""

    work: Path
    cmake: str
    ninja: str
    ccache: str | None

    @property
    def log(self) -> Path:
        return self.work / "build.log"

    def program(self, target: str) -> Path:
        """Where a target's program is after it was built."""
        return self.work / "build" / "bin" / target

    def compile(
        self, options: Sequence[str], targets: Sequence[str], progress: ProgressCallback
    ) -> None:
        """Configure and build the targets; the whole output is in the log."""
        build = self.work / "build"
        launchers = [f"-DCMAKE_{language}_COMPILER_LAUNCHER={self.ccache or ''}" for language in
                     ("C", "CXX")]  # fmt: skip
        self.log.unlink(missing_ok=True)
        progress(Progress("configuring"))
        self._run(
            [
                *(self.cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={self.ninja}"),
                *("-S", str(self.work / "src"), "-B", str(build)),
                *launchers,
                *options,
            ],
            "configure_failed", progress,
        )  # fmt: skip
        command = [self.cmake, "--build", str(build), "--target", *targets]
        self._run(command, "compile_failed", progress)

    def _run(self, command: list[str], code: str, progress: ProgressCallback) -> None:
        """Run one step, its output to the log and its count to the progress."""
        # ccache sees paths relative to the work directory, so that a second one costs nothing
        env = os.environ | {"NINJA_STATUS": "[%f/%t] ", "CCACHE_BASEDIR": str(self.work)}
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        with self.log.open("a") as log:
            print(*command, file=log, flush=True)
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", env=env,
            )  # fmt: skip
            with child:
                for line in child.stdout or ():
                    log.write(line)
                    tail.append(line.rstrip())
                    if found := STATUS.match(line):
                        progress(Progress("compiling", int(found[1]), int(found[2])))
        if child.returncode:
            said = "\n".join(tail)
            raise BuildError(
                code,
                f"{' '.join(command)}\nended with {child.returncode}. Its last lines:\n{said}",
                f"The whole output is in {self.log}.",
            )
