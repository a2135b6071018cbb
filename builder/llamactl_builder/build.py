"""The engine by content: built once for a pin, a patch set, options, a compiler and a processor."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_builder import (
    cmake,
    cpu,
    lock,
    models,
    patchset,
    paths,
    pin,
    probe,
    source,
    sync,
    toolchain,
)
from llamactl_builder.errors import BuilderError, os_errors
from llamactl_builder.progress import Progress, ProgressCallback, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KEY_DIGITS = 16
RECORD = "build.json"


@dataclass(frozen=True)
class EngineBuild:
    """A llama-server that has generated a token; `cmake.PATCHED_TARGETS` are beside it."""

    path: Path
    key: str
    cached: bool
    seconds: float
    patched: bool


@dataclass(frozen=True)
class ToolsBuild:
    """Programs of one engine's source and options that stand apart from it."""

    directory: Path
    cached: bool


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the binary is."""

    pin: pin.Pin
    patch_set: patchset.PatchSet | None
    options: tuple[str, ...]
    flags: dict[str, str]
    compilers: tuple[toolchain.Compiler, toolchain.Compiler]
    native: cpu.Native

    @property
    def work_key(self) -> str:
        """The patches left out: their change is an incremental build in the same place."""
        return _digest(
            self.pin.commit,
            self.patch_set is not None,
            self.cmake_options(amx=self.native.amx_granted),
            [compiler.identity for compiler in self.compilers],
            self.native.macros,
        )

    @property
    def key(self) -> str:
        files = patchset.files_of(self.patch_set) if self.patch_set else {}
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        return _digest(self.work_key, self.pin.source_sha256, sorted(hashes.items()))

    @property
    def targets(self) -> tuple[str, ...]:
        """The programs that are installed, the engine first."""
        return (cmake.TARGET, *(cmake.PATCHED_TARGETS if self.patch_set else ()))

    def cmake_options(self, *, amx: bool) -> list[str]:
        """The full option list; the caller's come last and so win."""
        off = () if amx else self.native.amx_off
        flags = {lang: " ".join((*text.split(), *off)) for lang, text in self.flags.items()}
        return [
            *cmake.OPTIONS,
            f"-DLLAMA_BUILD_NUMBER={self.pin.build_number}",
            f"-DLLAMA_BUILD_COMMIT={self.pin.commit[:7]}",
            *(f"-DCMAKE_{lang}_FLAGS={text}" for lang, text in flags.items()),
            f"-DCMAKE_C_COMPILER={self.compilers[0].path}",
            f"-DCMAKE_CXX_COMPILER={self.compilers[1].path}",
            *self.options,
        ]


@os_errors("Building the engine")
def ensure_engine(
    *,
    unpatched: bool = False,
    cmake_args: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    model: Path | None = None,
) -> EngineBuild:
    """The engine for this machine, built if it is not in the cache. Raises BuilderError.

    `unpatched` is the pristine engine; `cmake_args` are passed to CMake after ours; `model` is
    what a fresh binary must generate a token with (the default model otherwise).
    """
    started = time.monotonic()
    progress = progress or silent
    recipe = _recipe(unpatched, tuple(cmake_args))
    home = _home(recipe)

    def answer(*, cached: bool) -> EngineBuild:
        seconds = time.monotonic() - started
        return EngineBuild(home / cmake.TARGET, recipe.key, cached, seconds, not unpatched)

    if (home / cmake.TARGET).is_file():
        return answer(cached=True)
    with _work_locked(recipe, progress) as work:
        if (home / cmake.TARGET).is_file():
            return answer(cached=True)
        _build(recipe, work, home, model or models.ensure_default_model(progress), progress)
    return answer(cached=False)


@os_errors("Looking for the engine")
def cached_engine() -> Path | None:
    """The engine for this machine if it was built before; None otherwise. Builds nothing."""
    program = _home(_recipe(unpatched=False, cmake_args=())) / cmake.TARGET
    return program if program.is_file() else None


@os_errors("Building the test programs")
def ensure_test_tools(
    *, progress: ProgressCallback | None = None, model: Path | None = None
) -> ToolsBuild:
    """The test programs (`cmake.TEST_TARGETS`) of the patched engine. Raises BuilderError.

    They are compiled in the engine's own work directory, with the options that its binary was
    accepted with; `model` is for the engine, where that has to be built first.
    """
    progress = progress or silent
    ensure_engine(progress=progress, model=model)
    recipe = _recipe(unpatched=False, cmake_args=())
    options = json.loads((_home(recipe) / RECORD).read_text("utf-8"))["options"]
    return _ensure_apart(recipe, "test-tools", cmake.TEST_TARGETS, options, progress)


@os_errors("Building the programs for page files")
def ensure_programs(*, progress: ProgressCallback | None = None) -> ToolsBuild:
    """The programs beside the patched engine, built without it. Raises BuilderError.

    They need neither libllama nor a model, so this takes seconds where an engine takes minutes.
    """
    recipe = _recipe(unpatched=False, cmake_args=())
    options = recipe.cmake_options(amx=recipe.native.amx_granted)
    return _ensure_apart(recipe, "programs", cmake.PATCHED_TARGETS, options, progress or silent)


@os_errors("Looking for an engine")
def built_engine(program: str) -> Path | None:
    """An engine in the cache with `program` beside it: this machine's, else the newest one.

    Nothing is built or fetched, and without a compiler it is the newest one. None: there is none.
    """
    engines = paths.cache_dir() / "engines"
    records = sorted(engines.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime)
    homes = [record.parent for record in reversed(records)]
    with suppress(BuilderError):
        homes.insert(0, _home(_recipe(unpatched=False, cmake_args=())))
    for home in homes:
        if (home / cmake.TARGET).is_file() and (home / program).is_file():
            return home / cmake.TARGET
    return None


def _ensure_apart(
    recipe: Recipe,
    kind: str,
    targets: Sequence[str],
    options: list[str],
    progress: ProgressCallback,
) -> ToolsBuild:
    """Build targets in the engine's work directory and place them in one of their own."""
    home = paths.cache_dir() / kind / _digest(recipe.key, targets)
    if home.is_dir():
        return ToolsBuild(home, cached=True)
    with _work_locked(recipe, progress) as work:
        if home.is_dir():
            return ToolsBuild(home, cached=True)
        tools = _prepare(recipe, work, progress)
        tools.compile(options, targets, progress)
        record: dict[str, object] = {"engine": recipe.key, "options": options}
        _place([tools.program(name) for name in targets], home, record)
    return ToolsBuild(home, cached=False)


def _home(recipe: Recipe) -> Path:
    return paths.cache_dir() / "engines" / recipe.key


@contextmanager
def _work_locked(recipe: Recipe, progress: ProgressCallback) -> Iterator[Path]:
    """Yield the recipe's work directory; nobody else builds in it meanwhile."""
    work = paths.cache_dir() / "work" / recipe.work_key
    with lock.held(work.with_suffix(".lock"), "building this engine", progress):
        yield work


def _recipe(unpatched: bool, cmake_args: tuple[str, ...]) -> Recipe:
    patches = paths.patches_dir()
    c, cxx = (toolchain.find_compiler(language, cmake_args) for language in ("C", "CXX"))
    return Recipe(
        pin=pin.load(patches),
        patch_set=None if unpatched else patchset.load(patches),
        options=cmake_args,
        flags={"C": os.environ.get("CFLAGS", ""), "CXX": os.environ.get("CXXFLAGS", "")},
        compilers=(c, cxx),
        native=cpu.detect(c.path),
    )


def _prepare(recipe: Recipe, work: Path, progress: ProgressCallback) -> cmake.CMake:
    """Make the work directory's source what the recipe says; answers what compiles it."""
    clean = source.fetch(recipe.pin, paths.patches_dir(), progress)
    changed = patchset.patched_files(clean, recipe.patch_set) if recipe.patch_set else {}
    tools = cmake.CMake(
        work,
        toolchain.find_tool("cmake", progress),
        toolchain.find_tool("ninja", progress),
        shutil.which("ccache"),
    )
    progress(Progress("updating the source tree"))
    sync.sync(clean, recipe.pin.inputs, changed, work / "src")
    return tools


def _build(recipe: Recipe, work: Path, home: Path, model: Path, progress: ProgressCallback) -> None:
    """Build in the work directory, prove the binary, and put it in its place."""
    started = time.monotonic()
    tools = _prepare(recipe, work, progress)
    binary = tools.program(cmake.TARGET)
    amx = recipe.native.amx_granted
    options = recipe.cmake_options(amx=amx)
    tools.compile(options, recipe.targets, progress)
    progress(Progress("generating a first token"))
    try:
        probe.generate_token(binary, model)
    except probe.EngineCrashError:
        if not amx or not recipe.native.amx_off:
            raise
        # The kernel said yes to AMX and the binary died all the same: build without it.
        options = recipe.cmake_options(amx=False)
        tools.compile(options, recipe.targets, progress)
        progress(Progress("generating a first token"))
        probe.generate_token(binary, model)
    _place([tools.program(name) for name in recipe.targets], home, {
        "key": recipe.key,
        "tag": recipe.pin.tag,
        "commit": recipe.pin.commit,
        "patched": recipe.patch_set is not None,
        "compilers": [compiler.identity for compiler in recipe.compilers],
        "options": options,
        "seconds": round(time.monotonic() - started, 1),
    })  # fmt: skip


def _place(programs: Sequence[Path], home: Path, record: dict[str, object]) -> None:
    """Copy beside, sync, and rename: the directory is there whole or not at all."""
    home.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(home, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".place-") as scratch:
        made = Path(scratch) / home.name
        made.mkdir()
        for program in programs:
            shutil.copy2(program, made / program.name)
        (made / RECORD).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        for path in made.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        made.rename(home)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:KEY_DIGITS]
