"""What an applied tree was made from: the patch set of the last `apply` or `export`, by hashes.

It is in the tree's `.git`, as `sha256sum` writes it. A file of the patch set that is neither as it
was then nor as it is to be written now was edited where it is: to write it would lose that edit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl_builder import patchset, treehash
from llamactl_builder.errors import PatchError

if TYPE_CHECKING:
    from pathlib import Path

    from llamactl_builder.git import Repo
    from llamactl_builder.patchset import PatchSet

FILE_NAME = "patch-set.sha256"


def record(repo: Repo, patch_set: PatchSet) -> None:
    """Note that the tree was made from this patch set, or has just been written as it."""
    digests = {name: treehash.digest(data) for name, data in patchset.files_of(patch_set).items()}
    lines = (f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    _file(repo).write_text("".join(lines), "utf-8")


def check(repo: Repo, patches: Path, wanted: PatchSet) -> None:
    """Raise `patches_edited` if writing `wanted` to `patches` would lose an edit that is there."""
    to_write = patchset.files_of(wanted)
    path = _file(repo)
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    before = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    edited = [
        name
        for name, data in patchset.present(patches).items()
        if data != to_write.get(name) and treehash.digest(data) != before.get(name)
    ]
    if edited:
        raise PatchError(
            "patches_edited",
            f"Nothing was written. In {patches}, {', '.join(edited)} changed since {repo.path} was "
            "made: an export from there would overwrite that.",
            "`apply` into a new directory takes the change up, and `export` from there records it. "
            f"What you edited in {repo.path} has to be carried over to it. To give the change up, "
            "delete the named files first.",
        )


def _file(repo: Repo) -> Path:
    return repo.path / repo.text("rev-parse", "--git-path", FILE_NAME)
