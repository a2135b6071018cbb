"""The daemon's own end, at every bad moment: what the next one finds, and makes of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from llamactl_supervisor import procfs
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import ApplyRequest, EngineState, Receipt
from sandbox import WITHIN_S, Sandbox, until
from supervised import IDLE_S, causes, crash_record, ledger, until_generation

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=1, crashes_max=2, wedge_idle_s=IDLE_S)
    yield sandbox
    sandbox.close()


def test_what_outlives_its_daemon_is_of_whoever_asked_for_it() -> None:
    """A change that is under way, and a restart that has only begun."""
    box = Sandbox(stop_term_s=2)
    with contextlib.closing(box):
        daemon = box.start()
        box.up("--fake-ignore-term")
        until(lambda: box.client.ledger().lines)
        me = box.client.ledger().lines[0].by
        assert me == f"uid {os.getuid()} pid {os.getpid()}"
        box.say(slow_s=1)
        box.client.reconfigure(n_ctx=131072)
        until(lambda: box.say()["n_asked"])
        daemon.kill()
        daemon.wait(WITHIN_S)
        daemon = box.start()
        until(lambda: len(box.client.ledger().lines) == 2)
        assert box.client.ledger().lines[1].by == me
        box.client.restart()
        until(lambda: json.loads(box.paths.state_file.read_text())["stopping"])
        daemon.kill()
        daemon.wait(WITHIN_S)
        box.start()
        until_generation(box, 2)
        until(lambda: "restart" in causes(box))
        assert {line.by for line in box.client.ledger().lines} == {me}


def test_how_an_engine_ended_outlives_the_daemon(box: Sandbox) -> None:
    daemon = box.start()
    os.kill(box.up(), signal.SIGKILL)
    ended = until_generation(box, 2).last_exit
    assert ended is not None
    assert ended.last_lines
    record = until(lambda: box.client.status().crash_record)
    daemon.kill()
    daemon.wait(WITHIN_S)
    box.start()
    status = box.client.status()
    assert status.last_exit == ended.model_copy(update={"last_lines": ()}), "no words: no secrets"
    assert status.crash_record == record


def test_a_change_goes_on_over_the_death_of_its_daemon(box: Sandbox) -> None:
    """The reply has nobody to go to; the engine's own record tells the next daemon."""
    box.start()
    pid = box.up()
    box.say(slow_s=1.0)
    box.client.reconfigure(n_ctx=131072, n_seq=4)
    until(lambda: box.say()["n_asked"])
    box.kill_daemon()
    url = f"http://127.0.0.1:{box.port}/props"
    until(lambda: httpx.get(url, timeout=WITHIN_S).json()["last_reconfigure"])
    box.start()
    status = until_generation(box, 1)
    assert status.engine is not None
    assert status.engine.geometry is not None
    assert (status.engine.pid, status.engine.geometry.n_ctx) == (pid, 131072)
    assert status.override is not None
    assert (status.override.n_ctx, status.override.n_seq) == (131072, 4)
    assert (status.weight_loads, status.loads_avoided) == (1, 1)
    assert status.engine.last_reconfigure is not None
    assert isinstance(status.engine.last_reconfigure, Receipt)
    box.kill_daemon()
    box.start()
    assert until_generation(box, 1).loads_avoided == 1, "told once"


def test_a_load_that_outlives_its_daemon_is_in_the_ledger(box: Sandbox) -> None:
    box.start()
    box.client.up(box.request("--fake-load-s", "1.5"))
    until(lambda: box.client.status().engine)
    box.kill_daemon()
    box.start()
    until_generation(box, 1)
    until(lambda: box.paths.ledger_file.exists() and causes(box) == ["up"])
    assert ledger(box)[0]["load_s"] >= 1.5


def test_a_daemon_killed_in_the_middle_of_a_start_leaves_no_second_engine(box: Sandbox) -> None:
    """Whatever it had come to: the next one has exactly one engine, and nothing is left of it.

    Its load is what it was begun for.
    """
    for number in range(1, 6):
        box.start()
        box.client.up(box.request())
        box.kill_daemon()
        box.start()
        box.until_state(EngineState.READY)
        engines = [p for p in box.processes() if "--instance-id" in p.cmdline()]
        assert [engine.pid for engine in engines] == [box.engine_pid()]
        box.client.wait_down(timeout_s=WITHIN_S)
        assert box.leftovers() == []
        assert causes(box) == ["up"] * number
    assert {line["by"] for line in ledger(box)} == {f"uid {os.getuid()} pid {os.getpid()}"}


@pytest.mark.parametrize("how", ["restart", "apply"])
def test_a_relaunch_whose_engine_ends_after_its_daemon_is_still_what_it_was_begun_for(
    how: str,
) -> None:
    box = Sandbox(stop_term_s=60)
    with contextlib.closing(box):
        box.start()
        pid = box.up("--fake-ignore-term")
        if how == "restart":
            box.client.restart()
        else:
            box.client.apply(ApplyRequest.parse({"engine": {"extra_args": ["--threads", "3"]}}))
        until(lambda: json.loads(box.paths.state_file.read_text())["stopping"])
        box.kill_daemon()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(pid))
        box.start()
        until_generation(box, 2)
        until(lambda: causes(box) == ["up", how])
        assert len({line["by"] for line in ledger(box) if line["kind"] == "load"}) == 1


def test_the_evidence_of_a_wedge_is_found_by_the_next_daemon_too(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    box.kill_daemon()
    box.say(is_working=True)
    box.start()
    until_generation(box, 2)
    assert (crash_record(box)["pid"], crash_record(box)["cause"]) == (pid, "adopt")


def wedged_in_its_stop(box: Sandbox) -> int:
    """Return the pid of an engine whose daemon has found it wedged, and waits for its end."""
    box.env["LLAMACTL_STOP_TERM_S"] = "60"
    box.start()
    pid = box.up("--fake-wedged", "--fake-ignore-term")
    box.until_state(EngineState.STOPPING)
    box.env["LLAMACTL_STOP_TERM_S"] = "1"
    return pid


@pytest.mark.parametrize("by", ["the next daemon", "reap"])
def test_a_down_in_the_middle_of_a_stop_of_a_wedged_engine_is_ended_by(
    box: Sandbox, by: str
) -> None:
    pid = wedged_in_its_stop(box)
    for _ in range(2):
        box.daemons[-1].terminate()
    until(lambda: json.loads(box.paths.state_file.read_text())["intent"] == "down")
    assert psutil.pid_exists(pid)
    box.kill_daemon()
    if by == "reap":
        command = [sys.executable, "-m", "llamactl_supervisor", "reap"]
        subprocess.run(command, env=os.environ | box.env, check=True, timeout=WITHIN_S)
    else:
        box.start()
        until(lambda: not psutil.pid_exists(pid))
        box.until_state(EngineState.STOPPED)
        box.client.wait_down(timeout_s=WITHIN_S)
    assert box.leftovers() == []


def test_a_wedged_engine_is_replaced_though_its_daemon_dies_over_it(box: Sandbox) -> None:
    """By the next one: without a second TERM, and without finding out once more."""
    pid = wedged_in_its_stop(box)
    box.kill_daemon()
    box.env["LLAMACTL_WEDGE_IDLE_S"] = "600"
    box.start()
    until(lambda: box.client.status().generation == 2)
    assert not psutil.pid_exists(pid)
    assert "signal=SIGTERM" not in box.daemon_log().rpartition("adopting engine")[2]
    until(lambda: causes(box) == ["up", "wedge"])


def test_an_adopted_engine_that_is_stopped_is_found_as_soon(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    box.kill_daemon()
    os.kill(pid, signal.SIGSTOP)
    box.start()
    until_generation(box, 2)
    assert not psutil.pid_exists(pid)
    assert crash_record(box)["code"] == "start_stalled"


def test_a_load_is_not_given_up_by_a_daemon_that_was_stopped_itself() -> None:
    """However soon after the deadline it looks again."""
    box = Sandbox(ready_stall_s=2, stop_term_s=1)
    with contextlib.closing(box):
        daemon = psutil.Process(box.start().pid)
        loading = box.client.up(box.request("--fake-load-s", "6"))
        until(lambda: box.client.status().engine)
        daemon.suspend()
        left = time.monotonic() + 3.5
        until(lambda: time.monotonic() > left)
        daemon.resume()
        box.client.wait_operation(loading, timeout_s=WITHIN_S)
        assert box.client.status().generation == 1


@pytest.mark.parametrize("field", ["engine_start_ticks", "boot_id"])
def test_a_pid_that_somebody_else_has_by_now_is_neither_used_nor_signalled(
    box: Sandbox, field: str
) -> None:
    """The record of the dead engine names a living process: same pid, another start or boot."""
    box.start()
    pid = box.up()
    (path,) = box.paths.runtime.glob("engine-*/holder.json")
    record = json.loads(path.read_text())
    box.kill_daemon()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        me = procfs.identify(stranger.pid)
        assert me is not None
        record |= {"engine_pid": me.pid, "engine_start_ticks": me.start_ticks}
        record[field] = "another" if field == "boot_id" else me.start_ticks - 1
        os.kill(pid, signal.SIGKILL)
        until(lambda: not box.processes())
        path.write_text(json.dumps(record))
        box.start()
        box.until_state(EngineState.READY)
        assert box.engine_pid() not in {pid, stranger.pid}
        assert box.client.status().strangers == ()
        box.client.wait_down(timeout_s=WITHIN_S)
        assert stranger.poll() is None
        stranger.kill()
    assert box.leftovers() == []


def test_who_waits_when_the_daemon_hands_over_is_told(box: Sandbox) -> None:
    daemon = box.start()
    loading = box.client.up(box.request("--fake-load-s", "60"))
    until(lambda: box.client.status().engine)
    handing_over = threading.Timer(0.5, daemon.send_signal, [signal.SIGUSR2])
    handing_over.start()
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(loading, timeout_s=WITHIN_S)
    handing_over.join()
    assert caught.value.code == "shutting_down"
    assert daemon.wait(WITHIN_S) == 0
    assert "Traceback" not in box.daemon_log()
