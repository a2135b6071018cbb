"""What an applied tree says: its pristine commit, its hook commits, its uncommitted edits.

Any git repository has the right shape whose first commit is the clean source and whose later
commits change upstream files one hook at a time. A file that the first commit does not have is an
overlay file, committed or not.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llamactl_builder import patchset
from llamactl_builder.errors import PatchError
from llamactl_builder.git import Repo
from llamactl_builder.treehash import is_input

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

OVERLAY_SUBJECT = "overlay"
CHANGES = ("-z", "--no-renames", "--name-status")


@dataclass
class Step:
    """One hook: its header, and the full content of each upstream file after it."""

    name: str
    header: str
    files: dict[str, bytes]


@dataclass
class WorkTree:
    """An applied tree, read; nothing in it is changed by reading."""

    repo: Repo
    root: str
    pristine: dict[str, bytes]
    modes: dict[str, str]
    steps: list[Step]
    edits: dict[str, bytes] = field(default_factory=dict)
    overlay: dict[str, bytes] = field(default_factory=dict)

    def content(self, path: str, after: int) -> bytes:
        """The bytes of an upstream file once the first `after` hooks are applied."""
        for step in reversed(self.steps[:after]):
            if path in step.files:
                return step.files[path]
        return self.pristine[path]


def read(directory: Path, inputs: Iterable[str]) -> WorkTree:
    """Read an applied tree."""
    repo = Repo(directory)
    if not (directory / ".git").exists():
        raise PatchError(
            "not_applied", f"{directory} is not an applied tree (no .git).", "Run `apply` first."
        )
    roots = repo.text("rev-list", "--max-parents=0", "HEAD").split()
    if len(roots) != 1 or repo.text("rev-list", "--merges", "HEAD"):
        raise PatchError("not_linear", f"{directory}: the commits must be one line, no merges.")
    tree = WorkTree(repo, roots[0], *_pristine(repo, roots[0]), steps=[])
    for commit in repo.text("rev-list", "--reverse", f"{roots[0]}..HEAD").split():
        _read_commit(tree, commit)
    _read_uncommitted(tree)
    outside = [path for path in (*tree.overlay, *tree.edits) if not is_input(path, inputs)]
    if outside:
        raise PatchError(
            "outside_inputs",
            f"{directory} changes {', '.join(sorted(outside)[:5])}, which no build reads.",
            "Delete or revert it; what a build may read is `inputs` in upstream.toml.",
        )
    return tree


def _read_commit(tree: WorkTree, commit: str) -> None:
    """Add the hook that a commit is, if it changes upstream files at all."""
    repo, where = tree.repo, f"{tree.repo.path}: commit {commit[:10]}"
    listed = repo.names("diff-tree", "-r", *CHANGES, f"{commit}^", commit)
    files = _upstream_changes(tree, listed, where)
    if not files:
        return
    message = repo.run("log", "-1", "--format=%B", commit).decode()
    name, header = patchset.header_of(message, where)
    if any(step.name == name for step in tree.steps):
        raise PatchError(
            "hook_duplicate",
            f"{where} is a second commit for the hook {name!r}.",
            "Squash them (git rebase -i), or give it a name of its own.",
        )
    blobs = {path: repo.run("cat-file", "blob", f"{commit}:{path}") for path in files}
    tree.steps.append(Step(name, header, blobs))


def _read_uncommitted(tree: WorkTree) -> None:
    """Add what differs from the last commit, and the overlay as it is on disk."""
    repo, directory = tree.repo, tree.repo.path
    listed = repo.names("diff-index", *CHANGES, "HEAD")
    for path in _upstream_changes(tree, listed, f"{directory}: an uncommitted edit"):
        data = (directory / path).read_bytes()
        if data != tree.content(path, len(tree.steps)):
            tree.edits[path] = data
    for path in repo.names("ls-files", "-z", "--cached", "--others", "--exclude-standard"):
        if path not in tree.modes and (directory / path).is_file():
            tree.overlay[path] = (directory / path).read_bytes()


def _pristine(repo: Repo, root: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """Content and mode of every file in the first commit."""
    modes = {}
    for entry in repo.names("ls-tree", "-r", "-z", root):
        mode, _, rest = entry.partition(" ")
        modes[rest.partition("\t")[2]] = mode
    content = {}
    with tarfile.open(fileobj=io.BytesIO(repo.run("archive", "--format=tar", root))) as archive:
        for member in archive:
            if file := archive.extractfile(member):
                content[member.name] = file.read()
    return content, modes


def _upstream_changes(tree: WorkTree, listed: list[str], where: str) -> list[str]:
    """The upstream paths in a --name-status list; anything but a change of content is an error."""
    changed = []
    for status, path in zip(listed[::2], listed[1::2], strict=True):
        if path not in tree.modes:
            continue
        if status != "M":
            raise PatchError(
                "hook_not_a_change",
                f"{where} removes, renames or retypes {path}.",
                "A hook may only change the text of an upstream file.",
            )
        changed.append(path)
    return changed
