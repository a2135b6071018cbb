"""What a process has in memory, and which files it has mapped."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
DELETED = b" (deleted)"


@dataclass(frozen=True)
class Resident:
    """Resident memory in bytes, each byte in one part; `swapped_bytes` are not resident.

    `weights_bytes` are pages of GGUF files, `files_bytes` of every other file: program, libraries,
    shared memory. What is no file is `anonymous_bytes`. `committed_bytes` is the process's own
    memory, touched or not, as the metric `llamactl_engine_committed_bytes` has it.
    """

    weights_bytes: int
    files_bytes: int
    anonymous_bytes: int
    swapped_bytes: int
    committed_bytes: int

    @property
    def total_bytes(self) -> int:
        """The resident size of the process."""
        return self.weights_bytes + self.files_bytes + self.anonymous_bytes


def mapped_files(pid: int, suffix: str) -> set[tuple[int, int]]:
    """Return device and inode of every file mapped that has this ending, deleted ones too."""
    found = set()
    try:
        with Path(f"/proc/{pid}/maps").open("rb") as lines:
            for line in lines:
                fields = line.split(None, 5)
                name = fields[5].strip().removesuffix(DELETED) if len(fields) > 5 else b""
                if name.endswith(os.fsencode(suffix)) and name.startswith(b"/"):
                    major, _, minor = fields[3].partition(b":")
                    found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    except OSError:
        return set()
    return found


def resident(pid: int, model: str | None) -> Resident | None:
    """Return its memory by what is mapped; None for nobody, or for another user's process.

    Weights are what is mapped from `model` or from a file that ends in `.gguf`. All of it comes
    from one reading of smaps, save `committed_bytes`, so that it adds up.
    """
    wanted = b"" if model is None else os.fsencode(Path(model).resolve())
    weights = files = anonymous = swapped = 0
    kind = b""
    try:
        with Path(f"/proc/{pid}/smaps").open("rb") as lines:
            for line in lines:
                name, _, rest = line.partition(b" ")
                if name == b"Rss:":
                    n_bytes = int(rest.split()[0]) * 1024
                    if not kind.startswith(b"/"):
                        anonymous += n_bytes
                    elif kind == wanted or kind.endswith(b".gguf"):
                        weights += n_bytes
                    else:
                        files += n_bytes
                elif name == b"Swap:":
                    swapped += int(rest.split()[0]) * 1024
                elif not name.endswith(b":"):
                    # address, permissions, offset, device, inode, and then what is mapped
                    mapped = line.split(None, 5)[5:]
                    kind = mapped[0].strip().removesuffix(DELETED) if mapped else b""
        committed = int(Path(f"/proc/{pid}/statm").read_bytes().split()[5]) * PAGE_BYTES
    except OSError:
        return None
    return Resident(weights, files, anonymous, swapped, committed)
