"""Proves the patch set: source, hooks and overlay give the recorded tree, and export again."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_builder import patchset, pin, treehash
from llamactl_builder.apply import apply
from llamactl_builder.errors import PatchError
from llamactl_builder.export import export

if TYPE_CHECKING:
    from llamactl_builder.pin import Pin


def verify(source: Path, the_pin: Pin, patches: Path) -> None:
    """Raise PatchError with the first thing that does not hold."""
    patch_set = patchset.load(patches)
    changed = patchset.patched_files(source, patch_set)
    found = treehash.tree_sha256(source, the_pin.inputs, changed)
    if found != the_pin.patched_sha256:
        raise PatchError(
            "patched_mismatch",
            f"The patched tree hashes to {found}; {patches / pin.FILE_NAME} records "
            f"{the_pin.patched_sha256}. A hook or an overlay file is not as it was exported.",
            "Look at the difference (git diff patches); if it is meant, `apply` and `export`.",
        )
    with tempfile.TemporaryDirectory(prefix="llamactl-verify-") as scratch:
        tree, again = Path(scratch) / "tree", Path(scratch) / "patches"
        again.mkdir()
        shutil.copy2(patches / pin.FILE_NAME, again)
        apply(source, the_pin, patch_set, tree)
        export(tree, the_pin, again)
        _compare(patches, again, patch_set)


def _compare(patches: Path, again: Path, patch_set: patchset.PatchSet) -> None:
    """Every file of the patch set must come out of the export byte for byte."""
    for name in (pin.FILE_NAME, patchset.SERIES, *patchset.files_of(patch_set)):
        if (patches / name).read_bytes() != (again / name).read_bytes():
            raise PatchError(
                "export_differs",
                f"{patches / name} is not, byte for byte, what `export` makes of its own result.",
                "`apply` and `export` write it in the canonical form.",
            )
