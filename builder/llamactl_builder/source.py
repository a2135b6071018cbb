"""The clean pinned source: the submodule where it is checked out at the pin, else the package."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_builder import paths, pip, treehash
from llamactl_builder.errors import SourceError, ToolError
from llamactl_builder.pin import record as record_hash
from llamactl_builder.progress import Progress, ProgressCallback, silent

if TYPE_CHECKING:
    from llamactl_builder.pin import Pin

SUBMODULE = "llama.cpp"


def fetch(pin: Pin, patches: Path, progress: ProgressCallback = silent) -> Path:
    """A directory whose inputs hash to the recorded source hash. Never changed by anyone."""
    submodule = patches / SUBMODULE
    found = _hash_of(submodule, pin)
    if found == pin.source_sha256:
        return submodule
    unpacked = _unpacked(pin)
    if _hash_of(unpacked, pin) == pin.source_sha256:
        return unpacked
    progress(Progress(f"fetching {pin.package} {pin.version}, which carries llama.cpp {pin.tag}"))
    try:
        unpack(pin, unpacked)
    except ToolError as error:
        state = (
            "is not checked out"
            if found is None
            else f"is not at the pin (its tree hashes {found})"
        )
        raise SourceError(
            "source_unavailable",
            f"The source of llama.cpp {pin.tag} ({pin.commit}) could be had neither way. "
            f"The submodule {submodule} {state}. "
            f"The package {pin.package}=={pin.version}: {error.message}",
            "Either check the submodule out (git submodule update --init patches/llama.cpp), "
            "or let pip reach a package index (it must be able to run "
            f"`pip download {pin.package}=={pin.version}`).",
        ) from error
    found = _hash_of(unpacked, pin)
    if found != pin.source_sha256:
        raise SourceError(
            "source_mismatch",
            f"{unpacked}, out of the package {pin.package}=={pin.version}, hashes to {found}; "
            f"{patches / 'upstream.toml'} records {pin.source_sha256}.",
            "The pin is inconsistent: its package, inputs and source hash belong together. "
            "After a deliberate change of the pin run `fetch --record`.",
        )
    return unpacked


def record(pin: Pin, patches: Path) -> None:
    """Take the package's word: write the hash of its source tree into the pin."""
    unpack(pin, _unpacked(pin))
    record_hash(patches, "source_sha256", treehash.tree_sha256(_unpacked(pin), pin.inputs))


def _unpacked(pin: Pin) -> Path:
    return paths.cache_dir() / "source" / f"{pin.commit[:12]}-{pin.package_sha256[:12]}"


def unpack(pin: Pin, target: Path) -> None:
    """Download the package and put its source tree in place of `target`, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpack-") as scratch:
        download, tree = Path(scratch) / "download", Path(scratch) / "tree"
        download.mkdir()
        archive_path = pip.download(
            pin.package, pin.version, pin.package_sha256, download, source=True
        )
        with tarfile.open(archive_path) as archive:
            for member in archive:
                # NAME-VERSION/vendor/llama.cpp/PATH; the package's own files, some with the same
                # PATH, keep their NAME-VERSION here and so are no inputs.
                top = f"{member.name.partition('/')[0]}/{pin.package_path}/"
                inside = member.name.removeprefix(top)
                file = archive.extractfile(member) if member.isfile() else None
                if file and treehash.is_input(inside, pin.inputs):
                    (tree / inside).parent.mkdir(parents=True, exist_ok=True)
                    (tree / inside).write_bytes(file.read())
        if target.exists():
            shutil.rmtree(target)
        tree.rename(target)


def _hash_of(directory: Path, pin: Pin) -> str | None:
    """The tree hash, or None where there is no source tree at all."""
    if not (directory / "CMakeLists.txt").is_file():
        return None
    return treehash.tree_sha256(directory, pin.inputs)
