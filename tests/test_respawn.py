"""What keeps the daemon in a container: run again after a crash alone, and told of every signal."""

from __future__ import annotations

import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from sandbox import WITHIN_S, until

RESPAWN = Path(__file__).parents[1] / "deploy" / "respawn"
DAEMON = """
trap 'echo hup >> said' HUP
trap 'echo term >> said; exit 0' TERM
echo ready >> said
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize("status", [0, 2, 3, 5])
def test_an_end_that_is_meant_is_the_containers_own(tmp_path: Path, status: int) -> None:
    """Stopped, usage, given up, refused: as the systemd unit has it."""
    daemon = f"echo once >> runs; exit {status}"
    done = subprocess.run(
        (RESPAWN, "sh", "-c", daemon), cwd=tmp_path, timeout=WITHIN_S, check=False
    )
    assert done.returncode == status
    assert (tmp_path / "runs").read_text().split() == ["once"]


@pytest.mark.parametrize(("crash", "status"), [("exit 1", 1), ("kill -9 $$", 137)])
def test_a_crash_is_followed_by_another_daemon(tmp_path: Path, crash: str, status: int) -> None:
    daemon = f'echo once >> runs; [ "$(wc -l < runs)" -gt 1 ] || {crash}'
    done = subprocess.run(
        (RESPAWN, "sh", "-c", daemon),
        cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert (tmp_path / "runs").read_text().split() == ["once", "once"]
    assert f"the daemon ended with status {status} and is started again" in done.stderr


def has_said(said: Path, word: str, times: int) -> bool:
    """Return whether the daemon wrote the word as often."""
    return said.read_text().split().count(word) == times


def test_signals_are_the_daemons(tmp_path: Path) -> None:
    """HUP is passed on and ends nothing; TERM waits for the daemon, and its status is ours."""
    said = tmp_path / "said"
    with subprocess.Popen((RESPAWN, "sh", "-c", DAEMON), cwd=tmp_path) as keeper:
        try:
            until(said.exists)
            for times in (1, 2):
                keeper.send_signal(signal.SIGHUP)
                until(partial(has_said, said, "hup", times))
            keeper.terminate()
            assert keeper.wait(WITHIN_S) == 0
        finally:
            keeper.kill()
    assert said.read_text().split() == ["ready", "hup", "hup", "term"]


def test_a_daemon_that_dies_of_the_stop_is_not_run_again(tmp_path: Path) -> None:
    daemon = "echo once >> runs; while :; do sleep 0.05; done"
    with subprocess.Popen((RESPAWN, "sh", "-c", daemon), cwd=tmp_path) as keeper:
        try:
            until((tmp_path / "runs").exists)
            keeper.terminate()
            assert keeper.wait(WITHIN_S) == 128 + signal.SIGTERM
        finally:
            keeper.kill()
    assert (tmp_path / "runs").read_text().split() == ["once"]


def test_a_signal_that_comes_before_the_daemons_number_is_known_is_passed_on(
    tmp_path: Path,
) -> None:
    """It comes of the daemon's own first word: before its number is known, or just after."""
    daemon = "kill -TERM $PPID; while :; do sleep 0.05; done"
    for _ in range(20):
        ended = subprocess.run(
            (RESPAWN, "sh", "-c", daemon), cwd=tmp_path, timeout=WITHIN_S, check=False
        )
        assert ended.returncode == 128 + signal.SIGTERM
