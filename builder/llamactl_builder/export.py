"""Regenerates the patch set from an applied tree, byte for byte the same for the same content.

Uncommitted edits of upstream files are folded into the hook they belong to: the only hook that
touches the file, or the one named. The commits of the tree are rewritten to say the same.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_builder import made_from, patchset, pin, treehash, unified, worktree
from llamactl_builder.errors import PatchError
from llamactl_builder.git import Repo
from llamactl_builder.patchset import Hook, PatchSet

if TYPE_CHECKING:
    from llamactl_builder.pin import Pin
    from llamactl_builder.worktree import WorkTree


def export(directory: Path, the_pin: Pin, patches: Path, hook: str | None = None) -> list[str]:
    """Write the patch set of an applied tree to `patches`; answers what changed there.

    Raises `patches_edited`, before anything is written, if that would lose an edit made there.
    """
    tree = worktree.read(directory.resolve(), the_pin.inputs)
    _check_pristine(tree, the_pin)
    edited = bool(tree.edits)
    for path in sorted(tree.edits):
        _fold(tree, path, _owner(tree, path, hook))
    patch_set, head = _regenerate(tree)
    made_from.check(tree.repo, patches, patch_set)
    changes = patchset.save(patch_set, patches)
    made_from.record(tree.repo, patch_set)
    if pin.record(patches, "patched_sha256", _patched_sha256(tree, the_pin)):
        changes.append(f"wrote {pin.FILE_NAME}")
    if edited:
        tree.repo.run("reset", "-q", "--mixed", head)
    return changes


def _check_pristine(tree: WorkTree, the_pin: Pin) -> None:
    clean = {p: data for p, data in tree.pristine.items() if treehash.is_input(p, the_pin.inputs)}
    found = treehash.combine({path: treehash.digest(data) for path, data in clean.items()})
    if found != the_pin.source_sha256:
        raise PatchError(
            "pristine_mismatch",
            f"The first commit of {tree.repo.path} is not the pinned source: it hashes to {found}, "
            f"the pin records {the_pin.source_sha256}.",
            "Make a new tree with `apply` and carry your commits over.",
        )


def _patched_sha256(tree: WorkTree, the_pin: Pin) -> str:
    files = dict(tree.pristine)
    for step in tree.steps:
        files |= step.files
    files |= tree.overlay
    return treehash.combine(
        {
            p: treehash.digest(data)
            for p, data in files.items()
            if treehash.is_input(p, the_pin.inputs)
        }
    )


def _owner(tree: WorkTree, path: str, hook: str | None) -> int:
    """The index of the hook that an uncommitted edit of `path` belongs to."""
    names = [step.name for step in tree.steps]
    if hook is not None:
        if hook not in names:
            raise PatchError(
                "hook_unknown",
                f"There is no hook {hook!r} in {tree.repo.path}; it has: {', '.join(names)}.",
                "For a new hook, commit the change there with a message `name: what it does`, an "
                "empty line, and why it is needed and where it is called.",
            )
        return names.index(hook)
    owners = [at for at, step in enumerate(tree.steps) if path in step.files]
    if len(owners) != 1:
        touching = ", ".join(names[at] for at in owners)
        raise PatchError(
            "hook_ambiguous",
            f"The uncommitted edit of {path} could belong to several hooks: {touching}."
            if owners
            else f"No hook touches {path}, which has an uncommitted edit.",
            f"Say which with --hook NAME (of: {', '.join(names)}), or commit it as a new hook: "
            "`name: what it does`, an empty line, why it is needed and where it is called.",
        )
    return owners[0]


def _fold(tree: WorkTree, path: str, owner: int) -> None:
    """Make an uncommitted edit part of hook `owner`, and carry it through the later ones."""
    base, edited = tree.content(path, len(tree.steps)), tree.edits[path]
    folded: list[tuple[int, bytes]] = []
    for at in range(owner, len(tree.steps)):
        if at == owner or path in tree.steps[at].files:
            ours = tree.content(path, at + 1)
            folded.append((at, edited if ours == base else _merge(tree, path, at, ours)))
    for at, data in folded:
        tree.steps[at].files[path] = data


def _merge(tree: WorkTree, path: str, at: int, ours: bytes) -> bytes:
    """The edit, made to the file as it stood before later hooks changed it."""
    base, theirs = tree.content(path, len(tree.steps)), tree.edits[path]
    with tempfile.TemporaryDirectory() as scratch:
        names = ("ours", "base", "theirs")
        for name, data in zip(names, (ours, base, theirs), strict=True):
            (Path(scratch) / name).write_bytes(data)
        merged = subprocess.run(
            ["git", "merge-file", "-p", "--quiet", *names],
            cwd=scratch, capture_output=True, check=False,
        )  # fmt: skip
    if merged.returncode:
        later = ", ".join(step.name for step in tree.steps[at + 1 :] if path in step.files)
        raise PatchError(
            "hook_overlap",
            f"The uncommitted edit of {path} touches lines that a later hook changes, so it cannot "
            f"be folded into {tree.steps[at].name!r} (later: {later}).",
            "Name the later hook with --hook, or split the edit.",
        )
    return merged.stdout


def _regenerate(tree: WorkTree) -> tuple[PatchSet, str]:
    """The hooks as canonical diffs, and the commit at the end of the rewritten history."""
    hooks = []
    with tempfile.TemporaryDirectory() as scratch:
        repo = Repo(tree.repo.path, index=Path(scratch) / "index")
        repo.run("read-tree", tree.root)
        head, before = tree.root, repo.text("write-tree")
        for at, step in enumerate(tree.steps):
            after = repo.stage(step.files, tree.modes)
            if after == before:
                raise PatchError("hook_empty", f"The hook {step.name!r} changes nothing any more.")
            hook = Hook(step.name, step.header, repo.diff(before, after))
            _prove(tree, at, hook)
            hooks.append(hook)
            head, before = repo.commit_tree(after, step.header, head), after
        if tree.overlay:
            all_files = repo.stage(tree.overlay, {})
            head = repo.commit_tree(all_files, f"{worktree.OVERLAY_SUBJECT}\n", head)
    return PatchSet(tuple(hooks), tree.overlay), head


def _prove(tree: WorkTree, at: int, hook: Hook) -> None:
    """A regenerated hook must strictly give the content it was made from."""
    for change in unified.parse(hook.diff, hook.file_name):
        result = unified.patch(tree.content(change.path, at), change, hook.file_name)
        if result != tree.content(change.path, at + 1):
            raise PatchError("export_broken", f"{hook.file_name} does not reproduce {change.path}.")
