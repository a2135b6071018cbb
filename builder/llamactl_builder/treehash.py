"""The content hash of a source tree.

It covers the paths the build can read (`inputs` of the pin) and the bytes of their files, nothing
else: no mode, no time, no git metadata. So a submodule checkout and an unpacked package of the same
commit hash alike. By hand: `sha256sum` of every file, sorted by path in the C locale, and
`sha256sum` of that list.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from llamactl_builder.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# A .git is a directory in a clone and a pointer file in a submodule and in the package.
SKIPPED_NAMES = frozenset({".git", "__pycache__"})


def is_input(path: str, inputs: Iterable[str]) -> bool:
    """Whether a relative posix path lies in (or is) one of the inputs."""
    return any(path == top or path.startswith(f"{top}/") for top in inputs)


def list_files(root: Path, inputs: Iterable[str]) -> list[str]:
    """The relative posix paths of all input files below root, sorted by their bytes."""
    found: list[str] = []
    for top in inputs:
        if (root / top).is_file():
            found.append(top)
        for directory, names, files in os.walk(root / top):
            names[:] = [name for name in names if name not in SKIPPED_NAMES]
            for name in files:
                path = os.path.join(directory, name)  # noqa: PTH118 (thousands of files)
                if os.path.islink(path):  # noqa: PTH114
                    raise SourceError("source_has_links", f"{path} is a symbolic link.")
                if name not in SKIPPED_NAMES:
                    found.append(os.path.relpath(path, root).replace(os.sep, "/"))
    return sorted(found, key=os.fsencode)


def digest(data: bytes) -> str:
    """The hash of one file, as `combine` wants it."""
    return hashlib.sha256(data).hexdigest()


def combine(digests: Mapping[str, str]) -> str:
    """The tree hash of a mapping from relative path to the sha256 of the file."""
    total = hashlib.sha256()
    for path in sorted(digests, key=os.fsencode):
        total.update(f"{digests[path]}  {path}\n".encode())
    return total.hexdigest()


def tree_sha256(
    root: Path, inputs: Iterable[str], replaced: Mapping[str, bytes] | None = None
) -> str:
    """The tree hash of root, with `replaced` files standing in for (or added to) those on disk."""
    replaced = replaced or {}
    digests = {path: digest(data) for path, data in replaced.items()}
    for path in list_files(root, inputs):
        if path not in replaced:
            with (root / path).open("rb") as file:
                digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
    return combine(digests)
