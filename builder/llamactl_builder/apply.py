"""Makes an applied tree: the clean source, one commit for each hook, one for the overlay."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from llamactl_builder import made_from, patchset, treehash, worktree
from llamactl_builder.errors import PatchError
from llamactl_builder.git import Repo

if TYPE_CHECKING:
    from pathlib import Path

    from llamactl_builder.patchset import PatchSet
    from llamactl_builder.pin import Pin


def apply(source: Path, pin: Pin, patch_set: PatchSet, directory: Path) -> None:
    """Fill a new (or empty) directory; every hook must apply strictly."""
    if directory.exists() and any(directory.iterdir()):
        raise PatchError(
            "not_empty", f"{directory} is not empty.", "Name a new directory, or delete this one."
        )
    for path in treehash.list_files(source, pin.inputs):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, directory / path)
    repo = Repo(directory)
    repo.run("init", "-q")
    made_from.record(repo, patch_set)
    repo.run("add", "-f", "-A")
    _commit(repo, f"pristine: {pin.tag} {pin.commit}\n")
    changed: dict[str, bytes] = {}
    for hook in patch_set.hooks:
        files = patchset.hook_files(source, changed, hook)
        _write(directory, files)
        repo.run("add", "-f", "--", *files)
        _commit(repo, hook.header)
        changed |= files
    overlay = patchset.patched_files(source, patch_set).keys() - changed.keys()
    if overlay:
        _write(directory, {path: patch_set.overlay[path] for path in overlay})
        repo.run("add", "-f", "--", *sorted(overlay))
        _commit(repo, f"{worktree.OVERLAY_SUBJECT}\n")


def _write(directory: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)


def _commit(repo: Repo, message: str) -> None:
    repo.run("commit", "-q", "--cleanup=verbatim", "-F", "-", given=message.encode())
