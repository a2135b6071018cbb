"""A file is what it holds: touched, moved and copied it is the same; replaced it is another."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import fingerprint
from llamactl_supervisor.errors import LlamactlError

if TYPE_CHECKING:
    from pathlib import Path

LARGE = fingerprint.WHOLE_BYTES_MAX + 5 * 2**20


def write(path: Path, data: bytes, size: int = 0) -> Path:
    """Write a file; `size` makes it that long, without taking the disk for it."""
    path.write_bytes(data)
    if size:
        os.truncate(path, size)
    return path


def test_touched_moved_or_copied_is_the_same(tmp_path: Path) -> None:
    one = write(tmp_path / "one.gguf", b"GGUF weights")
    known = fingerprint.of(one)
    os.utime(one, ns=(1, 1))
    assert fingerprint.of(one) == known
    assert fingerprint.of(one.rename(tmp_path / "moved.gguf")) == known
    shutil.copy(tmp_path / "moved.gguf", tmp_path / "copied.gguf")
    assert fingerprint.of(tmp_path / "copied.gguf") == known


def test_replaced_at_the_same_path_is_another(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", b"GGUF one")
    known = fingerprint.of(path)
    write(tmp_path / "new", b"GGUF two").replace(path)
    assert fingerprint.of(path) != known


def test_overwritten_in_place_with_its_old_time_is_another(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", b"GGUF one")
    known, was = fingerprint.of(path), path.stat()
    path.write_bytes(b"GGUF two")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert fingerprint.of(path) != known


@pytest.mark.parametrize("at", [0, 2**20, fingerprint.HEAD_BYTES - 1, LARGE - 1])
def test_a_large_file_is_told_by_its_start_its_blocks_and_its_end(tmp_path: Path, at: int) -> None:
    path = write(tmp_path / "m.gguf", b"GGUF", LARGE)
    known = fingerprint.of(path)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\1")
    assert fingerprint.of(path) != known


def test_length_alone_tells_two_large_files_apart(tmp_path: Path) -> None:
    one = write(tmp_path / "one", b"", 4 * LARGE)
    two = write(tmp_path / "two", b"", 4 * LARGE + 1)
    assert fingerprint.of(one) != fingerprint.of(two)


def test_every_part_of_a_model_counts(tmp_path: Path) -> None:
    names = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    first, _, last = [write(tmp_path / name, name.encode()) for name in names]
    known = fingerprint.of(first)
    write(last, b"another")
    assert fingerprint.of(first) != known
    last.unlink()
    with pytest.raises(LlamactlError, match=r"m-00003-of-00003\.gguf") as caught:
        fingerprint.of(first)
    assert caught.value.code == "no_file"


def test_a_second_look_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", b"GGUF once")
    known = fingerprint.of(path)
    monkeypatch.setattr(fingerprint, "_digest", None)
    assert fingerprint.of(path) == known


def test_what_is_no_file_is_said_to_be_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "nothing", "."):
        with pytest.raises(LlamactlError) as caught:
            fingerprint.of(tmp_path / name)
        assert caught.value.code == "no_file"


def test_a_value_may_name_one_file_or_several_with_scales(tmp_path: Path) -> None:
    one = fingerprint.of(write(tmp_path / "a.gguf", b"a"))
    two = fingerprint.of(write(tmp_path / "b,c.gguf", b"b"))
    assert fingerprint.named("a.gguf", tmp_path) == one
    assert fingerprint.named(str(tmp_path / "b,c.gguf"), tmp_path) == two
    assert fingerprint.named("a.gguf:0.5", tmp_path) == f"{one}:0.5"
    assert fingerprint.named("a.gguf,x", tmp_path) == f"{one},x"
    for value in ("", "4", "no.gguf", ".", "x\0y", "a" * 5000):
        assert fingerprint.named(value, tmp_path) is None
