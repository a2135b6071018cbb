"""The patch set on disk: the series of hooks with their headers, and the overlay files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_builder import unified
from llamactl_builder.errors import PatchError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SERIES, HOOKS, OVERLAY = "series", "hooks", "overlay"
SUBJECT = re.compile(r"([a-z0-9][a-z0-9-]*): \S.*")


@dataclass(frozen=True)
class Hook:
    """One subject of change to upstream files. The header's first line is `name: what it does`."""

    name: str
    header: str
    diff: bytes

    @property
    def file_name(self) -> str:
        return f"{self.name}.patch"

    def to_bytes(self) -> bytes:
        return self.header.encode() + b"\n" + self.diff


@dataclass(frozen=True)
class PatchSet:
    """Hooks in the order they apply, and whole files by relative path."""

    hooks: tuple[Hook, ...]
    overlay: Mapping[str, bytes]


def header_of(message: str, where: str) -> tuple[str, str]:
    """The hook's name and its canonical header, from a commit message or a patch file."""
    header = "\n".join(line.rstrip() for line in message.strip().split("\n")) + "\n"
    subject, _, body = header.partition("\n")
    found = SUBJECT.fullmatch(subject)
    if not found or not body.strip():
        raise PatchError(
            "hook_header",
            f"{where}: a hook opens with `name: what it does` (lower case, digits and dashes "
            f"before the colon), an empty line, and why it is needed and where it is called; "
            f"found {subject!r}{'' if body.strip() else ' and nothing below it'}.",
        )
    if "\ndiff --git " in header:
        raise PatchError("hook_header", f"{where}: the header has a line that starts a diff.")
    return found[1], header


def parse_hook(data: bytes, file_name: str) -> Hook:
    """Read one patch file."""
    header, mark, rest = data.partition(b"\ndiff --git ")
    if not mark:
        raise PatchError("patch_malformed", f"{file_name} holds no diff.")
    name, text = header_of(header.decode("utf-8"), file_name)
    if file_name != f"{name}.patch":
        raise PatchError("hook_header", f"{file_name} says in its first line that it is {name!r}.")
    return Hook(name, text, mark[1:] + rest)


def load(patches: Path) -> PatchSet:
    """Read a patch set; a hook file that the series does not list is an error."""
    try:
        names = (patches / SERIES).read_text("utf-8").split()
    except OSError as error:
        raise PatchError(
            "patch_set_unreadable", f"Cannot read {patches / SERIES}: {error.strerror}."
        ) from error
    present = {path.name for path in (patches / HOOKS).glob("*.patch")}
    if sorted(names) != sorted(present):
        odd = ", ".join(sorted(set(names) ^ present)) or "a name listed twice"
        raise PatchError(
            "series_mismatch", f"{patches / SERIES} and {patches / HOOKS} disagree on: {odd}."
        )
    hooks = tuple(parse_hook((patches / HOOKS / name).read_bytes(), name) for name in names)
    root = patches / OVERLAY
    files = sorted(path for path in root.rglob("*") if path.is_file())
    overlay = {path.relative_to(root).as_posix(): path.read_bytes() for path in files}
    return PatchSet(hooks, overlay)


def files_of(patch_set: PatchSet) -> dict[str, bytes]:
    """The patch set as files, by path relative to the patches directory."""
    files = {f"{HOOKS}/{hook.file_name}": hook.to_bytes() for hook in patch_set.hooks}
    files[SERIES] = "".join(f"{hook.file_name}\n" for hook in patch_set.hooks).encode()
    return files | {f"{OVERLAY}/{path}": data for path, data in patch_set.overlay.items()}


def present(patches: Path) -> dict[str, bytes]:
    """The files that a patch set consists of, as they are there, by path relative to `patches`."""
    tops = ((patches / HOOKS).rglob("*"), (patches / OVERLAY).rglob("*"), [patches / SERIES])
    found = sorted(path for top in tops for path in top if path.is_file())
    return {path.relative_to(patches).as_posix(): path.read_bytes() for path in found}


def save(patch_set: PatchSet, patches: Path) -> list[str]:
    """Make the directory hold exactly this patch set; answers what was written or removed."""
    wanted, found = files_of(patch_set), present(patches)
    changes: list[str] = []
    for name in sorted(found.keys() - wanted.keys()):
        (patches / name).unlink()
        changes.append(f"removed {name}")
    for name, data in sorted(wanted.items()):
        if found.get(name) != data:
            (patches / name).parent.mkdir(parents=True, exist_ok=True)
            (patches / name).write_bytes(data)
            changes.append(f"wrote {name}")
    return changes


def patched_files(source: Path, patch_set: PatchSet) -> dict[str, bytes]:
    """Every file that differs from (or is not in) the clean source, with its patched bytes."""
    files: dict[str, bytes] = {}
    for hook in patch_set.hooks:
        files |= hook_files(source, files, hook)
    for path, data in patch_set.overlay.items():
        if (source / path).exists():
            raise PatchError(
                "overlay_shadows_upstream",
                f"The overlay file {path} exists upstream; an upstream file is changed by a hook.",
            )
        files[path] = data
    return files


def hook_files(source: Path, before: Mapping[str, bytes], hook: Hook) -> dict[str, bytes]:
    """The files one hook changes, given the source and what the hooks before it made of it."""
    files: dict[str, bytes] = {}
    for change in unified.parse(hook.diff, hook.file_name):
        old = before.get(change.path)
        if old is None:
            try:
                old = (source / change.path).read_bytes()
            except OSError as error:
                raise PatchError(
                    "patch_rejected",
                    f"{hook.file_name} changes {change.path}, which the source does not have "
                    f"({error.strerror}).",
                ) from error
        files[change.path] = unified.patch(old, change, hook.file_name)
    return files
