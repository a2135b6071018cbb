"""What a process has in memory, by what is mapped."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_cli import smaps
from llamactl_supervisor import procfs

if TYPE_CHECKING:
    from pathlib import Path

MAP_FOREVER = """
import mmap, sys
held = []
for path in sys.argv[1:]:
    file = open(path, "rb")
    held.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    held[-1][:: mmap.PAGESIZE]
print("mapped", flush=True)
sys.stdin.read()
"""


def test_memory_is_told_by_what_is_mapped(tmp_path: Path) -> None:
    """Weights by their ending or by the model's own name, though it was removed meanwhile."""
    files = [tmp_path / name for name in ("a b.gguf", "named", "other")]
    for number, file in enumerate(files, 1):
        file.write_bytes(b"x" * number * 2**20)
    command = [sys.executable, "-c", MAP_FOREVER, *map(str, files)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with_both = smaps.resident(child.pid, str(files[1]))
        files[0].unlink()
        without = smaps.resident(child.pid, None)
        rss = psutil.Process(child.pid).memory_info().rss
        child.kill()
    assert with_both is not None
    assert without is not None
    assert with_both.weights_bytes == 3 * 2**20
    assert without.weights_bytes == 2**20
    # Until it comes to rest, the program itself may take some pages more.
    assert without.files_bytes - with_both.files_bytes == pytest.approx(2 * 2**20, rel=0.1)
    assert with_both.total_bytes == pytest.approx(rss, rel=0.1)
    assert without.total_bytes == pytest.approx(rss, rel=0.1)


def test_nobody_has_no_memory_and_no_age() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert smaps.resident(gone.pid, None) is None
    assert procfs.age_s(gone.pid) is None
    assert (procfs.age_s(os.getpid()) or 0) > 0
