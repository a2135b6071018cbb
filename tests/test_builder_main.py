"""`python -m llamactl_builder` as a developer runs it: the loop, its output and its exit codes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from upstream_fixture import COMMON, Upstream, copy_upstream

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def up(tiny_upstream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upstream:
    """The tiny upstream, its source as the checked-out submodule."""
    upstream = copy_upstream(tiny_upstream, tmp_path)
    shutil.copytree(upstream.source, upstream.patches / "llama.cpp")
    monkeypatch.setenv("LLAMACTL_PATCHES_DIR", str(upstream.patches))
    monkeypatch.setenv("LLAMACTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return upstream


def builder(*args: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "llamactl_builder", *args],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_the_developers_loop(up: Upstream, tmp_path: Path) -> None:
    tree = tmp_path / "work"
    assert builder("apply", str(tree)) == (0, f"{tree}\n", "")
    assert builder("export", str(tree)) == (0, "nothing changed\n", "")
    (tree / COMMON).write_bytes((tree / COMMON).read_bytes().replace(b"common_9;", b"common_99;"))
    wrote = "wrote hooks/second-call.patch\nwrote upstream.toml\n"
    assert builder("export", str(tree)) == (0, wrote, "")
    status, said, _ = builder("verify")
    assert (status, said.split()[0], said.split()[-1]) == (0, "verified:", up.pin.patched_sha256)


def test_fetch_prints_the_source_and_records_a_new_pin(
    up: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert builder("fetch") == (0, f"{up.patches / 'llama.cpp'}\n", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(up.packages))
    good = up.pin.source_sha256
    path = up.patches / "upstream.toml"
    path.write_text(path.read_text().replace(good, ""))
    assert builder("fetch", "--record") == (0, f"{up.patches / 'llama.cpp'}\n", "")
    assert up.pin.source_sha256 == good


def test_an_engine_that_is_not_there_is_not_built_unasked(
    up: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert up.patches.exists()
    monkeypatch.setenv("LLAMACTL_CACHE_DIR", str(tmp_path / "cache"))
    assert builder("engine-path", "--cached") == (0, "", "")


def test_an_error_is_words_on_stderr_and_status_1(up: Upstream) -> None:
    shutil.rmtree(up.patches / "llama.cpp")
    status, out, said = builder("verify")
    assert (status, out) == (1, "")
    assert "error: The source of llama.cpp b1" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("verb", ["verify", "engine-path", "model-path"])
def test_a_cache_that_cannot_be_made_is_words_too(
    up: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    shutil.rmtree(up.patches / "llama.cpp")
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMACTL_CACHE_DIR", str(tmp_path / "file/cache"))
    status, out, said = builder(verb)
    assert (status, out) == (1, "")
    assert f"Not a directory: '{tmp_path / 'file/cache'}'" in said
    assert "LLAMACTL_CACHE_DIR" in said
    assert "Traceback" not in said
