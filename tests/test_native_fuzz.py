"""What reads the files of a page, fuzzed for as long as LLAMACTL_FUZZ_S says (default: a minute).

A crash leaves its input in the directory that the failure names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import native_programs
import pytest
from llamactl_builder import toolchain
from llamactl_builder.errors import ToolError

if TYPE_CHECKING:
    from pathlib import Path

FUZZ_S = int(os.environ.get("LLAMACTL_FUZZ_S", "60"))
N_BYTES_MAX = 4096
LIMITS = (
    f"-max_len={N_BYTES_MAX}",
    *("-malloc_limit_mb=1", "-rss_limit_mb=512", "-timeout=10"),
)
"""One piece of memory is in proportion to its input; the rest is the sanitizer's own."""
N_RUNS_LEAST = 1000


@pytest.fixture
def target(tmp_path: Path) -> native_programs.Target:
    if not shutil.which("clang++"):
        pytest.skip("nothing to fuzz with: install clang (Debian, Ubuntu)")
    sanitized = (*native_programs.SANITIZED, "-fsanitize=fuzzer", "-pthread")
    empty = tmp_path / "empty.cpp"
    empty.write_text('extern "C" int LLVMFuzzerTestOneInput(const char *, long) { return 0; }')
    try:
        toolchain.run("clang++", *sanitized, str(empty), "-o", str(tmp_path / "empty"))
    except ToolError:
        pytest.skip("clang has no libFuzzer here: install libclang-rt-dev (Debian, Ubuntu)")
    return native_programs.find_target("posix", "clang++", *native_programs.WARNINGS, *sanitized)


def test_page_files_are_accepted_only_as_they_would_be_written(
    target: native_programs.Target, tmp_path: Path
) -> None:
    maker = native_programs.built(
        native_programs.NATIVE / "make-page-codec-corpus.cpp", native_programs.host()
    )
    fuzzer = native_programs.built(native_programs.NATIVE / "fuzz-page-codec.cpp", target)
    first, corpus = tmp_path / "first", tmp_path / "corpus"
    first.mkdir()
    corpus.mkdir()
    subprocess.run([maker, first], check=True)
    done = subprocess.run(
        [
            # Between them a shell: a process begins with the most that was resident of its parent.
            *("sh", "-c", '"$@"; exit $?', "sh"),
            *(fuzzer, *LIMITS, f"-max_total_time={FUZZ_S}", "-print_final_stats=1"),
            *(f"-artifact_prefix={tmp_path}/", corpus, first),
        ],
        capture_output=True, text=True, errors="replace", check=False, timeout=FUZZ_S + 60,
        # What is freed is kept apart to find who uses it still: less than by default.
        env=os.environ | {"ASAN_OPTIONS": "quarantine_size_mb=16"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    n_runs = re.search(r"number_of_executed_units: +(\d+)", done.stderr)
    assert n_runs
    assert int(n_runs[1]) > N_RUNS_LEAST
