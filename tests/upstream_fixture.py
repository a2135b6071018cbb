"""A tiny upstream: a source tree, the package that carries it, and a patch set directory for it."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_builder import patchset, pin, treehash
from llamactl_builder.apply import apply
from llamactl_builder.export import export
from llamactl_builder.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

SERVER = "tools/server/server.cpp"
COMMON = "common/common.cpp"
NEW = "tools/server/server-new.cpp"
FILES = {
    "CMakeLists.txt": b"project(tiny)\n",
    ".gitignore": b"/build*\n*.o\n",
    COMMON: "".join(f"int common_{i};\n" for i in range(40)).encode(),
    SERVER: "".join(f"    line({i});\n" for i in range(60)).encode(),
    "tools/server/crlf.txt": b"one\r\ntwo\r\nthree\r\n",
    "tools/server/no-newline.txt": b"one\ntwo",
    "docs/unread.md": b"no build reads this\n",
}
INPUTS = (".gitignore", "CMakeLists.txt", "common", "tools")
# A build backend inside the package itself, so that pip needs no index to read its metadata.
BACKEND = b"""
import os
def get_requires_for_build_wheel(config_settings=None): return []
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    os.makedirs(f"{directory}/tiny_carrier-1.0.dist-info")
    with open(f"{directory}/tiny_carrier-1.0.dist-info/METADATA", "w") as file:
        file.write("Metadata-Version: 2.1\\nName: tiny-carrier\\nVersion: 1.0\\n")
    return "tiny_carrier-1.0.dist-info"
"""
PYPROJECT = b"""
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
PIN = """\
[upstream]
url = "https://example.invalid/tiny"
tag = "b1"
commit = "1111111111111111111111111111111111111111"
build_number = 1

[package]
name = "tiny-carrier"
version = "1.0"
sha256 = "{package_sha256}"
path = "vendor/tiny"

[tree]
inputs = {inputs}
source_sha256 = "{source_sha256}"
patched_sha256 = ""
"""


@dataclass(frozen=True)
class Upstream:
    """The paths of one tiny upstream, and the verbs of the tool on them."""

    source: Path
    patches: Path
    packages: Path
    tree: Path

    @property
    def pin(self) -> pin.Pin:
        return pin.load(self.patches)

    def apply(self, tree: Path | None = None) -> Path:
        tree = tree or self.tree
        apply(self.source, self.pin, patchset.load(self.patches), tree)
        return tree

    def export(self, hook: str | None = None, tree: Path | None = None) -> list[str]:
        return export(tree or self.tree, self.pin, self.patches, hook)

    def verify(self) -> None:
        verify(self.source, self.pin, self.patches)

    def patch_bytes(self) -> dict[str, bytes]:
        return {
            path.relative_to(self.patches).as_posix(): path.read_bytes()
            for path in sorted(self.patches.rglob("*"))
            if path.is_file()
        }

    def commit(self, subject: str, body: str = "Because. Called from main.") -> None:
        git(self.tree, "add", "-A")
        git(self.tree, "commit", "-q", "-m", f"{subject}\n\n{body}")

    def edit(self, path: str, old: str, new: str) -> None:
        data = (self.tree / path).read_bytes()
        assert data.count(old.encode()) == 1
        (self.tree / path).write_bytes(data.replace(old.encode(), new.encode()))


def git(directory: Path, *args: str) -> str:
    """Git as a developer has it: with a configuration that must not leak into an export."""
    config = (
        *("user.name=dev", "user.email=dev@localhost", "diff.noprefix=true", "color.ui=always"),
        *("diff.algorithm=patience", "diff.context=9"),
    )
    options = [part for item in config for part in ("-c", item)]
    done = subprocess.run(
        ["git", *options, *args], cwd=directory, capture_output=True, text=True, check=True
    )
    return done.stdout


def write_files(root: Path, files: dict[str, bytes]) -> None:
    """Write files below root, making directories as needed."""
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def write_package(directory: Path, files: dict[str, bytes]) -> str:
    """Write the carrier's source distribution; answers its sha256."""
    inside = {f"vendor/tiny/{path}": data for path, data in files.items()}
    inside |= {"pyproject.toml": PYPROJECT, "backend.py": BACKEND}
    # What the real package has: files of its own at upstream's paths, and a git pointer file.
    inside |= {"CMakeLists.txt": b"project(carrier)\n", "common/carrier.cpp": b"int carrier;\n"}
    inside |= {"vendor/tiny/.git": b"gitdir: ../../.git/modules/vendor/tiny\n"}
    inside |= {"PKG-INFO": b"Metadata-Version: 2.1\nName: tiny-carrier\nVersion: 1.0\n"}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tiny_carrier-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in inside.items():
            member = tarfile.TarInfo(f"tiny_carrier-1.0/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def at(root: Path) -> Upstream:
    """The tiny upstream that lives below root."""
    return Upstream(root / "source", root / "patches", root / "packages", root / "tree")


def copy_upstream(made: Path, root: Path) -> Upstream:
    """A copy to change at will of the one that `make_upstream` made."""
    shutil.copytree(made, root, dirs_exist_ok=True)
    return at(root)


def make_upstream(root: Path) -> Upstream:
    """A tiny upstream with two hooks that meet in one file, and one overlay file."""
    up = at(root)
    write_files(up.source, FILES)
    text = PIN.format(
        package_sha256=write_package(up.packages, FILES),
        inputs=list(INPUTS),
        source_sha256=treehash.tree_sha256(up.source, INPUTS),
    )
    write_files(up.patches, {"upstream.toml": text.encode(), "series": b""})
    up.apply()
    up.edit(SERVER, "line(5);", "line(5); first();")
    up.commit("first-call: call first() after line 5")
    up.edit(SERVER, "line(20);", "line(20); second();")
    up.edit(COMMON, "common_7;", "common_7 = 7;")
    up.commit("second-call: call second() after line 20")
    write_files(up.tree, {NEW: b"void first() {}\n"})
    up.export()
    return up
