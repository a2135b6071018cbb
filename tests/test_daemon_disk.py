"""What a daemon writes, its engine's log and its state, and where the disk takes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import (
    EngineState,
    OperationState,
    Receipt,
)
from sandbox import WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=2, crashes_max=2)
    yield sandbox
    sandbox.close()


def test_a_flood_is_drained_while_the_log_takes_nothing(box: Sandbox) -> None:
    """Every file of daemon, holder and engine may have 100 kB: the log is soon full for good."""
    box.env["LLAMACTL_LOG_BYTES_MAX"] = str(2**30)
    daemon = box.start()
    psutil.Process(daemon.pid).rlimit(psutil.RLIMIT_FSIZE, (100_000, 100_000))
    box.up("--fake-flood", str(20 * 2**20))
    assert box.paths.engine_log.stat().st_size <= 100_000
    engine = box.client.status().engine
    assert engine is not None
    assert engine.log_dropped_bytes > 0, "it is said while the engine runs"
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    last = box.client.status().last_exit
    assert last is not None
    assert last.dropped_bytes > 19 * 2**20
    assert last.last_lines[-1] == "fake engine ends", "the ring in RAM has what the disk has not"


def test_logs_are_rotated_and_followed(box: Sandbox) -> None:
    box.env |= {"LLAMACTL_LOG_BYTES_MAX": "65536", "LLAMACTL_LOG_FILES_MAX": "3"}
    box.start()
    box.up("--fake-flood", str(2**20))
    sizes = {path.name for path in box.paths.logs.glob("engine.log*")}
    assert sizes == {"engine.log", "engine.log.1", "engine.log.2"}
    with contextlib.closing(box.client.logs(lines=1, follow=True)) as lines:
        assert "flooding" in next(lines)
        box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
        assert next(line for line in lines if "ends" in line).endswith("stderr fake engine ends")


def test_a_follower_does_not_hold_up_the_end(box: Sandbox) -> None:
    """It is told of it: no patience of the daemon's ends it."""
    box.env["LLAMACTL_CLOSE_S"] = "600"
    daemon = box.start()
    box.up()
    with contextlib.closing(box.client.logs(follow=True)) as lines:
        assert "fake engine on" in next(lines)
        daemon.terminate()
        assert list(lines)[-1].endswith("fake engine ends")
    assert daemon.wait(WITHIN_S) == 0


def test_a_follower_is_told_that_its_daemon_was_killed(box: Sandbox) -> None:
    daemon = box.start()
    box.up()
    with contextlib.closing(box.client.logs(follow=True)) as lines:
        assert "fake engine on" in next(lines)
        daemon.kill()
        with pytest.raises(LlamactlError) as caught:
            list(lines)
    assert caught.value.exit_code == 4


def test_a_state_that_cannot_be_saved_starts_no_engine(box: Sandbox) -> None:
    daemon = box.start()
    disk(daemon, full=True)
    problem = box.refused()
    assert problem.code == "state_unwritable"
    assert [process.pid for process in box.processes()] == [daemon.pid]


def test_a_full_disk_is_told_to_whoever_changes_something(box: Sandbox) -> None:
    """The change is made, and it is said that neither state nor ledger has it."""
    daemon = box.start()
    box.up()
    disk(daemon, full=True)
    changed = box.client.wait_operation(box.client.reconfigure(n_ctx=131072), timeout_s=WITHIN_S)
    assert isinstance(changed.result, Receipt)
    assert changed.warning is not None
    assert changed.warning.code == "state_unwritable"
    status = box.client.status()
    assert status.unsaved == changed.warning
    assert (status.ledger_lost, box.client.ledger().lost) == (1, 1)
    stopped = box.client.wait_down(timeout_s=WITHIN_S)
    assert stopped is not None
    assert stopped.warning is not None
    assert stopped.warning.code == "state_unwritable"


def test_nothing_is_told_before_it_is_written_down(box: Sandbox) -> None:
    """The ledger is a pipe that nobody reads yet: whoever opens it to write has to wait."""
    box.start()
    os.mkfifo(box.paths.ledger_file, 0o600)
    loading = box.client.up(box.request())
    box.until_state(EngineState.READY)
    assert box.client.operation(loading.id).state is OperationState.RUNNING
    reader = os.open(box.paths.ledger_file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        box.client.wait_operation(loading, timeout_s=WITHIN_S)
    finally:
        os.close(reader)
    assert box.client.status().ledger_lost == 1, "no pipe can be a ledger"


def disk(daemon: subprocess.Popen[bytes], *, full: bool) -> None:
    """Have every file of the daemon end after 10 bytes, or no more."""
    most = 10 if full else psutil.RLIM_INFINITY
    psutil.Process(daemon.pid).rlimit(psutil.RLIMIT_FSIZE, (most, psutil.RLIM_INFINITY))


def test_a_full_disk_ends_no_engine_that_it_would_not_let_start_again(box: Sandbox) -> None:
    daemon = box.start()
    pid = box.up()
    disk(daemon, full=True)
    with pytest.raises(LlamactlError) as caught:
        box.client.restart()
    assert (caught.value.code, caught.value.exit_code) == ("restart_refused", 5)
    assert caught.value.details["reason"] == "state_unwritable"
    status = box.client.status()
    assert (status.state, status.unsaved, box.engine_pid()) == (EngineState.READY, None, pid)
    disk(daemon, full=False)
    box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert box.engine_pid() != pid


def test_an_engine_that_a_full_disk_keeps_away_comes_when_there_is_room(box: Sandbox) -> None:
    daemon = box.start()
    pid = box.up()
    disk(daemon, full=True)
    os.kill(pid, signal.SIGKILL)
    until(lambda: "state_unwritable" in box.client.status().model_dump_json())
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.start(), timeout_s=WITHIN_S)
    assert caught.value.code == "state_unwritable"
    disk(daemon, full=False)
    box.until_state(EngineState.READY)
    assert box.engine_pid() != pid


def test_the_log_says_why_an_engine_ended(box: Sandbox) -> None:
    box.start("--log-format", "json")
    os.kill(box.up(), signal.SIGKILL)
    until(lambda: box.client.status().generation == 2)
    lines = [json.loads(line) for line in box.daemon_log().splitlines()]
    (told,) = (line for line in lines if line["level"] == "error")
    assert "engine_exited: the engine was ended by signal 9 (SIGKILL)" in told["message"]
    assert (told["error"]["code"], told["error"]["signal"]) == ("engine_exited", 9)
    assert told["error"]["exit_code"] is None
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    box.refused("--fake-load-exit", "3")
    assert '"exit_code": 3' in box.daemon_log()
    assert "kind=up fail: engine_exited: the engine exited with status 3" in box.daemon_log()
