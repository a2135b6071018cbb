"""What the kernel says of one process: whether it is still that one, its age, its memory."""

from __future__ import annotations

import os
import time
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


def boot_id() -> str:
    """Return the name of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def start_ticks(pid: int) -> int | None:
    """Return when it began, in ticks since boot; None for nobody and for a zombie.

    A pid can be reused, a pid with its start in one boot cannot.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *numbers = stat.rpartition(b")")[2].split()
    return None if state in {b"Z", b"X"} else int(numbers[18])


def age_s(pid: int) -> float | None:
    """Return for how long it has run, in seconds."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    up_s = float(Path("/proc/uptime").read_text("ascii").split()[0])
    return round(max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK")), 1)


def began_at(pid: int) -> float | None:
    """Return when it began, in seconds since the epoch: by the clock as it is now."""
    age = age_s(pid)
    return None if age is None else time.time() - age


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


def command_line(pid: int) -> list[str]:
    """Return its arguments; none where they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in text.split(b"\0")[:-1]]


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
