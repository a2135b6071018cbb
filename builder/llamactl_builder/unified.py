"""Strict unified diffs: every line where the hunk says it is, byte for byte.

`git apply` and `patch` both let a hunk slide to another line, and neither can be told not to. Here
nothing slides: no offset, no fuzz, no whitespace leniency. Only changes of existing text files
exist; a patch set adds files through its overlay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llamactl_builder.errors import PatchError

HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?\n")
NO_NEWLINE = b"\\ No newline at end of file\n"


@dataclass(frozen=True)
class Hunk:
    """Lines with their one-byte mark (space, minus, plus), and where they stand (from 0)."""

    old_at: int
    new_at: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """All hunks of one file, in order."""

    path: str
    hunks: tuple[Hunk, ...]


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their newline; unlike splitlines, a carriage return is an ordinary byte."""
    lines = data.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def parse(diff: bytes, name: str) -> list[FileDiff]:
    """Read the diff part of a hook; `name` only serves the error messages."""
    lines = split_lines(diff)
    at = 0
    files: list[FileDiff] = []

    def malformed(what: str) -> PatchError:
        return PatchError("patch_malformed", f"{name}, diff line {at + 1}: {what}.")

    while at < len(lines):
        head = re.fullmatch(rb"diff --git a/(\S+) b/(\S+)\n", lines[at])
        if not head or head[1] != head[2]:
            raise malformed("expected `diff --git a/PATH b/PATH` with one and the same path")
        marks = [b"--- a/" + head[1] + b"\n", b"+++ b/" + head[1] + b"\n"]
        if lines[at + 1 : at + 3] != marks:
            raise malformed(f"a hook may only change the text of {head[1].decode()}")
        at += 3
        hunks: list[Hunk] = []
        while at < len(lines) and (found := HUNK.fullmatch(lines[at])):
            at += 1
            old_left, new_left = (int(found[i]) if found[i] else 1 for i in (2, 4))
            old_at = int(found[1]) - (1 if old_left else 0)
            new_at = int(found[3]) - (1 if new_left else 0)
            body: list[bytes] = []
            while old_left or new_left or (at < len(lines) and lines[at] == NO_NEWLINE):
                line = lines[at] if at < len(lines) else b""
                if line == NO_NEWLINE and body:
                    body[-1] = body[-1].removesuffix(b"\n")
                elif line[:1] in (b" ", b"-", b"+"):
                    body.append(line)
                    old_left -= line[:1] != b"+"
                    new_left -= line[:1] != b"-"
                else:
                    raise malformed("the hunk ends before its own line count")
                at += 1
            hunks.append(Hunk(old_at, new_at, tuple(body)))
        if not hunks:
            raise malformed(f"no hunk for {head[1].decode()}")
        files.append(FileDiff(head[1].decode(), tuple(hunks)))
    return files


def patch(old: bytes, change: FileDiff, name: str) -> bytes:
    """The new bytes of one file, or PatchError at the first line that is not as the hunk says."""
    lines = split_lines(old)
    out: list[bytes] = []
    cursor = 0
    for hunk in change.hunks:
        out += lines[cursor : hunk.old_at]
        cursor = hunk.old_at
        if len(out) != hunk.new_at:
            raise PatchError(
                "patch_malformed",
                f"{name}: {change.path}: a hunk says its result starts at line {hunk.new_at + 1}, "
                f"but it would at line {len(out) + 1}.",
            )
        for line in hunk.lines:
            mark, text = line[:1], line[1:]
            if mark == b"+":
                out.append(text)
                continue
            found = lines[cursor] if cursor < len(lines) else None
            if found != text:
                raise PatchError(
                    "patch_rejected",
                    f"{name} does not apply: {change.path} line {cursor + 1}: "
                    f"the hook expects {text!r}, the source has {found!r}.",
                    "The source is not the one the hook was made for, or the hook was edited by "
                    "hand. Re-apply, make the change in the applied tree and run `export`.",
                )
            if mark == b" ":
                out.append(text)
            cursor += 1
    return b"".join(out + lines[cursor:])
