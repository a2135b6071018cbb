"""The daemon's own log stays small, and keeps what the interpreter says."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
import logging, os, sys
from pathlib import Path
from llamactl_supervisor import daemon_log
os.umask(0o077)
logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(sys.stderr)])
daemon_log.rotate(Path(sys.argv[1]), 1000, 3)
for number in range(100):
    logging.info("line %04d %s", number, "x" * 40)
os.write(2, b"raw\\n")
"""


def run(tmp_path: Path, file: Path) -> None:
    with file.open("ab") as log:
        command = [sys.executable, "-c", SOURCE, str(tmp_path / "daemon.log")]
        subprocess.run(command, stdout=log, stderr=log, check=True, env=os.environ, timeout=60)


def test_it_is_rotated_by_size_and_count(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    run(tmp_path, log)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["daemon.log", "daemon.log.1", "daemon.log.2"]
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    kept = "".join((tmp_path / name).read_text() for name in reversed(files)).splitlines()
    numbers = [int(line.split()[1]) for line in kept if line.startswith("INFO:root:line")]
    assert numbers == list(range(numbers[0], 100))
    assert kept[-1] == "raw"


REMOVED = """
import logging, os, shutil, sys
from pathlib import Path
from llamactl_supervisor import daemon_log
logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(sys.stderr)])
path = Path(sys.argv[1])
daemon_log.rotate(path, 1000, 3)
logging.info("before")
shutil.rmtree(path.parent)
logging.info("after")
os.write(2, b"raw\\n")
"""


def test_one_that_was_removed_is_made_again_with_its_directory(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "daemon.log"
    log.parent.mkdir()
    with log.open("ab") as out:
        command = [sys.executable, "-c", REMOVED, str(log)]
        subprocess.run(command, stdout=out, stderr=out, check=True, env=os.environ, timeout=60)
    assert log.read_text() == "INFO:root:after\nraw\n"


@pytest.mark.parametrize("linked", [False, True])
def test_another_file_is_left_to_its_owner(tmp_path: Path, *, linked: bool) -> None:
    other = tmp_path / "mine.log"
    if linked:
        (tmp_path / "daemon.log").touch()
    run(tmp_path, other)
    assert len(other.read_text().splitlines()) == 101
    assert not (tmp_path / "daemon.log.1").exists()
