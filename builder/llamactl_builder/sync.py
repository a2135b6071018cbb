"""Keeps a work copy of the source equal to what it should be, touching only files that differ.

The compiler's dependency tracking goes by file time, so an untouched file is an unbuilt one: after
a change of one patch only what it reaches is compiled again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl_builder import treehash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def sync(
    source: Path, inputs: Sequence[str], replaced: Mapping[str, bytes], target: Path
) -> list[str]:
    """Make target's inputs equal to source's with `replaced` on top; answers what was touched."""
    wanted = {*treehash.list_files(source, inputs), *replaced}
    touched = []
    for path in treehash.list_files(target, inputs):
        if path not in wanted:
            (target / path).unlink()
            touched.append(path)
    for path in sorted(wanted):
        data = replaced[path] if path in replaced else (source / path).read_bytes()
        file = target / path
        if not file.is_file() or file.read_bytes() != data:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            touched.append(path)
    return touched
