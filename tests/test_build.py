"""The build, with real CMake, ninja and compiler, on an engine that compiles in a second."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from llamactl_builder import build, cmake, cpu, models, paths, treehash
from llamactl_builder.errors import BuilderError, BuildError, ToolError
from llamactl_builder.probe import EngineCrashError
from upstream_fixture import PIN, write_files

if TYPE_CHECKING:
    from llamactl_builder.progress import Progress

TINY = Path(__file__).parent / "fakes/tiny-engine"
EXTRA = b"int extra() { return 1; }\n"
INPUTS = ("CMakeLists.txt", "src")
HOOK = """\
link-extra: compile the overlay too

An overlay file is compiled only when upstream's list names it. Called from CMake.

diff --git a/CMakeLists.txt b/CMakeLists.txt
--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -2,5 +2,5 @@ cmake_minimum_required(VERSION 3.14)
 project(tiny CXX)
 set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
 set(TINY_TOKENS 1 CACHE STRING "how many tokens an answer says it has")
-add_executable(llama-server src/main.cpp src/answer.cpp)
+add_executable(llama-server src/main.cpp src/answer.cpp src/extra.cpp)
 target_compile_definitions(llama-server PRIVATE TINY_TOKENS=${TINY_TOKENS})
"""


@pytest.fixture
def patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A patch set for the tiny engine, its source as the checked-out submodule."""
    patches = tmp_path / "patches"
    shutil.copytree(TINY, patches / "llama.cpp")
    text = PIN.format(
        package_sha256="0" * 64,
        inputs=list(INPUTS),
        source_sha256=treehash.tree_sha256(TINY, INPUTS),
    )
    write_files(patches, {
        "upstream.toml": text.encode(),
        "series": b"link-extra.patch\n",
        "hooks/link-extra.patch": HOOK.encode(),
        "overlay/src/extra.cpp": EXTRA,
    })  # fmt: skip
    monkeypatch.setenv("LLAMACTL_PATCHES_DIR", str(patches))
    monkeypatch.setenv("LLAMACTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cmake, "PATCHED_TARGETS", ())
    for name in ("CFLAGS", "CXXFLAGS", "CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return patches


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file: the tiny engine does not read its model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    return path


def engines() -> list[str]:
    return sorted(path.name for path in (paths.cache_dir() / "engines").glob("*"))


def compiled() -> list[str]:
    """The sources that the last build compiled."""
    (log,) = (paths.cache_dir() / "work").glob("*/build.log")
    lines = log.read_text().splitlines()
    return sorted(Path(line).stem for line in lines if "Building CXX object" in line)


def test_built_once_then_cached(patches: Path, model: Path) -> None:
    reports: list[Progress] = []
    made = build.ensure_engine(progress=reports.append, model=model)
    assert (made.cached, made.patched) == (False, True)
    assert made.path.parent.name == made.key
    assert compiled() == ["answer.cpp", "extra.cpp", "main.cpp"]
    counts = [(report.done, report.total) for report in reports if report.stage == "compiling"]
    assert counts[-1] == (4, 4)
    assert reports[-1].stage == "generating a first token"
    record = json.loads((made.path.parent / "build.json").read_text())
    assert (record["key"], record["tag"], record["patched"]) == (made.key, "b1", True)
    shutil.rmtree(patches / "llama.cpp")
    again = build.ensure_engine(model=model)
    assert (again.path, again.key, again.cached) == (made.path, made.key, True)
    assert engines() == [made.key]


def test_a_changed_patch_recompiles_what_it_reaches(patches: Path, model: Path) -> None:
    made = build.ensure_engine(model=model)
    write_files(patches, {"overlay/src/extra.cpp": EXTRA + b"int more() { return 2; }\n"})
    changed = build.ensure_engine(model=model)
    assert compiled() == ["extra.cpp"]
    assert engines() == sorted([made.key, changed.key])
    write_files(patches, {"overlay/src/extra.cpp": EXTRA})
    assert build.ensure_engine(model=model).cached
    assert build.ensure_engine(model=model).key == made.key


def test_unpatched_and_other_options_stand_beside(patches: Path, model: Path) -> None:
    made = build.ensure_engine(model=model)
    plain = build.ensure_engine(unpatched=True, model=model)
    optioned = build.ensure_engine(cmake_args=["-DTINY_UNUSED=1"], model=model)
    assert len({made.key, plain.key, optioned.key}) == 3
    assert not plain.patched
    write_files(patches, {"overlay/src/extra.cpp": EXTRA + b"\n"})
    assert build.ensure_engine(unpatched=True, model=model).cached


def test_programs_of_the_patch_set_are_installed_with_the_patched_engine_alone(
    patches: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert patches.is_dir()
    monkeypatch.setattr(cmake, "PATCHED_TARGETS", ("tiny-tool",))
    made = build.ensure_engine(cmake_args=["-DLLAMA_BUILD_TESTS=ON"], model=model)
    said = subprocess.run([made.path.with_name("tiny-tool")], capture_output=True, check=True)
    assert said.stdout == b"tool\n"
    plain = build.ensure_engine(unpatched=True, model=model)
    assert sorted(path.name for path in plain.path.parent.iterdir()) == ["build.json", cmake.TARGET]


def test_test_programs_are_built_beside_the_engine_when_they_are_asked_for(
    patches: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cmake, "TEST_TARGETS", ("tiny-tool",))
    engine = build.ensure_engine(model=model)
    assert "tool.cpp" not in compiled()
    made = build.ensure_test_tools()
    assert not made.cached
    assert compiled() == ["tool.cpp"]
    said = subprocess.run([made.directory / "tiny-tool"], capture_output=True, check=True)
    assert said.stdout == b"tool\n"
    record = json.loads((made.directory / "build.json").read_text())
    built = json.loads((engine.path.parent / "build.json").read_text())
    assert (record["engine"], record["options"]) == (engine.key, built["options"])
    assert engines() == [engine.key]
    shutil.rmtree(paths.cache_dir() / "work")
    shutil.rmtree(patches / "llama.cpp")
    again = build.ensure_test_tools()
    assert (again.directory, again.cached) == (made.directory, True)


def test_programs_beside_the_engine_are_built_without_it_and_without_a_model(
    patches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cmake, "PATCHED_TARGETS", ("tiny-tool",))
    monkeypatch.setattr(models, "ensure_default_model", lambda _: pytest.fail("a model"))
    made = build.ensure_programs()
    assert (made.cached, compiled(), engines()) == (False, ["tool.cpp"], [])
    said = subprocess.run([made.directory / "tiny-tool"], capture_output=True, check=True)
    assert said.stdout == b"tool\n"
    shutil.rmtree(patches / "llama.cpp")
    again = build.ensure_programs()
    assert (again.directory, again.cached) == (made.directory, True)


def test_a_built_engine_is_this_machines_else_the_newest_with_the_program(
    patches: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.built_engine(cmake.TARGET) is None
    made = build.ensure_engine(model=model)
    assert build.built_engine("tool") is None

    def place(name: str, *programs: str) -> Path:
        home = paths.cache_dir() / "engines" / name
        home.mkdir()
        for program in programs:
            (home / program).touch()
        (home / "build.json").write_text("{}")
        os.utime(home / "build.json", (now + len(engines()), now + len(engines())))
        return home / cmake.TARGET

    now = time.time()
    place("older", cmake.TARGET, "tool")
    newer = place("newer", cmake.TARGET, "tool")
    place("without", cmake.TARGET)
    place("torn", "tool")
    assert build.built_engine("tool") == newer
    (made.path.parent / "tool").touch()
    assert build.built_engine("tool") == made.path

    write_files(patches, {"overlay/src/extra.cpp": EXTRA + b"\n"})  # another engine's
    assert build.built_engine("tool") == newer
    monkeypatch.setenv("PATH", "")
    assert build.built_engine("tool") == newer


def test_test_programs_follow_the_patches(
    patches: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cmake, "TEST_TARGETS", ("tiny-tool",))
    made = build.ensure_test_tools(model=model)
    write_files(patches, {"overlay/src/extra.cpp": EXTRA + b"int more() { return 2; }\n"})
    changed = build.ensure_test_tools(model=model)
    assert (changed.cached, changed.directory == made.directory) == (False, False)
    assert (changed.directory / "tiny-tool").is_file()


def test_a_compile_error_shows_the_compilers_words(patches: Path, model: Path) -> None:
    write_files(patches, {"overlay/src/extra.cpp": b"int extra() { return nothing; }\n"})
    with pytest.raises(
        BuildError, match=r"nothing. was not declared|identifier .nothing"
    ) as caught:
        build.ensure_engine(model=model)
    assert caught.value.code == "compile_failed"
    assert caught.value.hint is not None
    assert "build.log" in caught.value.hint
    assert engines() == []
    write_files(patches, {"overlay/src/extra.cpp": EXTRA})
    assert not build.ensure_engine(model=model).cached


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"#include <csignal>\nstatic int dead = raise(SIGSEGV);\n", "engine_crashed", "SIGSEGV"),
        (b"#include <cstdlib>\nstatic int dead = (exit(9), 0);\n", "engine_no_token", "with 9"),
    ],
    ids=["signal", "exit"],
)  # fmt: skip
def test_a_binary_that_dies_is_not_accepted(
    patches: Path, model: Path, body: bytes, code: str, said: str
) -> None:
    write_files(patches, {"overlay/src/extra.cpp": body + b"int extra() { return dead; }\n"})
    with pytest.raises(BuildError, match=said) as caught:
        build.ensure_engine(model=model)
    assert caught.value.code == code
    assert engines() == []


def test_a_binary_that_generates_nothing_is_not_accepted(patches: Path, model: Path) -> None:
    assert patches.is_dir()
    with pytest.raises(BuildError, match="no token in the answer") as caught:
        build.ensure_engine(cmake_args=["-DTINY_TOKENS=0"], model=model)
    assert caught.value.code == "engine_no_token"
    assert engines() == []


def test_two_builds_at_once_are_one(patches: Path, model: Path) -> None:
    assert patches.is_dir()
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda _: build.ensure_engine(model=model), range(2)))
    assert made[0].path == made[1].path
    assert sorted(result.cached for result in made) == [False, True]


def test_no_compiler_is_one_sentence(patches: Path, model: Path, monkeypatch: pytest.MonkeyPatch,
                                     tmp_path: Path) -> None:  # fmt: skip
    assert patches.is_dir()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError) as caught:
        build.ensure_engine(model=model)
    assert caught.value.code == "compiler_missing"
    assert caught.value.message == "No C compiler: cc / gcc / clang is not on PATH."
    assert caught.value.hint == "Install one (Debian, Ubuntu: apt-get install g++), or set CC."


def test_a_compiler_that_does_not_answer(patches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert patches.is_dir()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuilderError) as caught:
        build.ensure_engine()
    assert caught.value.code == "compiler_broken"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64")
@pytest.mark.parametrize("granted", [True, False])
def test_amx_is_left_out_when_refused_or_deadly(
    patches: Path, model: Path, monkeypatch: pytest.MonkeyPatch, granted: bool
) -> None:
    """Refused by the kernel: not built in. Granted, but the binary dies: built again without."""
    assert patches.is_dir()
    native = cpu.Native("#define __AMX_TILE__ 1", ("AMX_TILE",), granted)
    monkeypatch.setattr(cpu, "detect", lambda _: native)
    monkeypatch.setenv("CXXFLAGS", "-mamx-tile")
    stages: list[str] = []
    made = build.ensure_engine(progress=lambda report: stages.append(report.stage), model=model)
    assert stages.count("generating a first token") == (2 if granted else 1)
    options = json.loads((made.path.parent / "build.json").read_text())["options"]
    assert "-DCMAKE_CXX_FLAGS=-mamx-tile -mno-amx-tile" in options
    assert build.ensure_engine(model=model).cached


def test_a_crash_without_amx_is_not_tried_again(
    patches: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = cpu.Native("", (), True)
    monkeypatch.setattr(cpu, "detect", lambda _: native)
    body = b"#include <csignal>\nstatic int dead = raise(SIGILL);\nint extra() { return dead; }\n"
    write_files(patches, {"overlay/src/extra.cpp": body})
    stages: list[str] = []
    with pytest.raises(EngineCrashError, match="SIGILL"):
        build.ensure_engine(progress=lambda report: stages.append(report.stage), model=model)
    assert stages.count("generating a first token") == 1
