"""The stages of `make test`: each test is of exactly one, and none is forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stages import Stage

TESTS = Path(__file__).parent
ROOT = TESTS.parent
FILES = ("test_native.py", "test_describe.py", "test_args.py", "test_page_files_limits_live.py")
"""One of each stage, and one that has tests of two."""


def run_pytest(*words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=cwd, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def collected(*words: str) -> set[str]:
    done = run_pytest("--collect-only", "-q", *words, *(TESTS / name for name in FILES))
    assert done.returncode == 0, done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_each_test_is_of_exactly_one_stage() -> None:
    stages = {stage: collected("--stage", stage) for stage in Stage}
    assert all(stages.values())
    whole = collected()
    assert set().union(*stages.values()) == whole
    assert sum(map(len, stages.values())) == len(whole)
    files = {stage: {name.partition("::")[0] for name in found} for stage, found in stages.items()}
    assert files == {
        Stage.NATIVE: {"tests/test_native.py"},
        Stage.PYTHON: {"tests/test_args.py"},
        Stage.ENGINE: {"tests/test_args.py", "tests/test_page_files_limits_live.py"},
        Stage.DOCS: {"tests/test_describe.py"},
    }


@pytest.mark.parametrize(
    ("name", "fixtures", "stage"),
    [
        ("test_native.py", [], Stage.NATIVE),
        ("test_native_fuzz.py", ["target"], Stage.NATIVE),
        ("test_docs.py", ["home", "engine_path"], Stage.DOCS),
        ("test_plan.py", ["tmp_path", "tiny_upstream"], Stage.PYTHON),
        ("test_args.py", ["engine_path"], Stage.ENGINE),
        ("test_args.py", [], Stage.PYTHON),
        ("test_carry_live.py", ["live", "tiny"], Stage.ENGINE),
    ],
)
def test_a_stage_is_found_from_what_a_test_uses(
    name: str, fixtures: list[str], stage: Stage
) -> None:
    file = TESTS / name
    assert Stage.of(file, fixtures) == stage
    assert stage.may_be_in(file)


def test_files_of_other_stages_are_not_looked_into() -> None:
    assert [s for s in Stage if s.may_be_in(TESTS / "test_native.py")] == [Stage.NATIVE]
    assert [s for s in Stage if s.may_be_in(TESTS / "test_plan.py")] == [Stage.PYTHON, Stage.ENGINE]


def test_an_engine_is_not_got_behind_the_back_of_a_stage(tmp_path: Path) -> None:
    file = tmp_path / "test_sly.py"
    file.write_text("def test_sly(request):\n    request.getfixturevalue('tools_dir')\n")
    done = run_pytest("-p", "conftest", "--stage", "python", file, cwd=tmp_path)
    assert done.returncode == 1
    assert "@pytest.mark.usefixtures('tools_dir')" in done.stdout


def test_all_stages_are_run_whatever_fails_and_each_is_told(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "making $2"\n[ "$2" != broken ]\n')
    make.chmod(0o755)

    def run(*stages: str) -> tuple[int, list[str]]:
        words = [str(ROOT / "ci" / "stages"), str(make), *stages]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.splitlines()

    code, said = run("lint", "broken", "python")
    assert code == 1
    assert [line for line in said if "making" in line] == [
        "making lint", "making broken", "making python",
    ]  # fmt: skip
    told = [line.split()[:2] for line in said[-3:]]
    assert told == [["lint", "passed"], ["broken", "FAILED"], ["python", "passed"]]
    assert run("lint")[0] == 0
