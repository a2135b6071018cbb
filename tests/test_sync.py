"""The work copy of the source: equal to what it should be, and untouched where it already was."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llamactl_builder.sync import sync
from upstream_fixture import write_files

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = ["src"]


def test_only_what_differs_is_touched(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_files(source, {"src/a": b"a\n", "src/b": b"b\n", "docs/c": b"c\n"})
    assert sync(source, INPUTS, {"src/new/d": b"d\n"}, target) == ["src/a", "src/b", "src/new/d"]
    assert not (target / "docs").exists()
    os.utime(target / "src/a", ns=(1, 1))
    assert sync(source, INPUTS, {"src/b": b"patched\n"}, target) == ["src/new/d", "src/b"]
    assert (target / "src/a").stat().st_mtime_ns == 1
    assert (target / "src/b").read_bytes() == b"patched\n"
    assert not (target / "src/new/d").exists()
    assert sync(source, INPUTS, {"src/b": b"patched\n"}, target) == []


def test_a_damaged_copy_is_repaired(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_files(source, {"src/a": b"a\n", "src/b": b"b\n"})
    sync(source, INPUTS, {}, target)
    write_files(target, {"src/a": b"half"})
    (target / "src/b").unlink()
    assert sync(source, INPUTS, {}, target) == ["src/a", "src/b"]
    assert (target / "src/a").read_bytes() == b"a\n"
