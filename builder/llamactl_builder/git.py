"""The git command, cut off from the user's configuration so that it answers alike anywhere."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_builder.errors import ToolError

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = (
    "safe.directory=*",
    "core.quotePath=false",
    "core.autocrlf=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.hooksPath=/dev/null",
    "diff.orderFile=/dev/null",
    "diff.suppressBlankEmpty=false",
    "commit.gpgSign=false",
    "gc.auto=0",
)
DIFF = (
    *("diff-tree", "-r", "-p", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--unified=3", "--inter-hunk-context=0", "--diff-algorithm=histogram", "--indent-heuristic"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
IDENTITY = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "llamactl"), ("EMAIL", "llamactl@localhost"))
}


@dataclass(frozen=True)
class Repo:
    """One git work tree; `index` stands in for its own index file, so that it stays untouched."""

    path: Path
    index: Path | None = None

    def run(self, *args: str, given: bytes | None = None) -> bytes:
        """Run git there and return its output, or raise with what it said."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        env |= IDENTITY | {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CEILING_DIRECTORIES": str(self.path.resolve().parent),
            "LC_ALL": "C",
        }
        if self.index:
            env["GIT_INDEX_FILE"] = str(self.index)
        command = ["git", *(part for item in SETTINGS for part in ("-c", item)), *args]
        try:
            done = subprocess.run(
                command, cwd=self.path, env=env, input=given, capture_output=True, check=False
            )
        except FileNotFoundError as error:
            raise ToolError(
                "git_missing",
                "git is needed to apply, export or verify the patch set, and is not on PATH.",
                "Install it (Debian: apt-get install git).",
            ) from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise ToolError("git_failed", f"git {' '.join(args)} in {self.path} failed: {said}")
        return done.stdout

    def text(self, *args: str, given: bytes | None = None) -> str:
        return self.run(*args, given=given).decode().strip()

    def names(self, *args: str) -> list[str]:
        """The output of a command that lists NUL-terminated names."""
        return self.run(*args).decode().split("\0")[:-1]

    def write_blob(self, data: bytes) -> str:
        return self.text("hash-object", "-w", "--stdin", given=data)

    def stage(self, files: dict[str, bytes], modes: dict[str, str]) -> str:
        """Put files into the index and answer the tree it now makes."""
        lines = [
            f"{modes.get(path, '100644')} {self.write_blob(data)}\t{path}\n"
            for path, data in sorted(files.items())
        ]
        self.run("update-index", "--add", "--index-info", given="".join(lines).encode())
        return self.text("write-tree")

    def commit_tree(self, tree: str, message: str, parent: str | None) -> str:
        parents = ("-p", parent) if parent else ()
        return self.text("commit-tree", tree, *parents, "-F", "-", given=message.encode())

    def diff(self, old_tree: str, new_tree: str) -> bytes:
        """The canonical diff: fixed options, no index lines."""
        lines = self.run(*DIFF, old_tree, new_tree).split(b"\n")
        return b"\n".join(line for line in lines if not line.startswith(b"index "))
