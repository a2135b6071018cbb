"""What goes wrong with an engine or a daemon, each once, over real processes and a fake engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from llamactl_supervisor import process
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineState, Receipt
from sandbox import WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamactl_supervisor.models import Status

IDLE_S = 1.0
"""How long an engine may stand still in these tests."""


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=1, crashes_max=2, wedge_idle_s=IDLE_S)
    yield sandbox
    sandbox.close()


def ledger(box: Sandbox) -> list[dict[str, Any]]:
    return [json.loads(line) for line in box.paths.ledger_file.read_text().splitlines()]


def causes(box: Sandbox) -> list[str]:
    return [line.get("cause", "avoided") for line in ledger(box)]


def crash_record(box: Sandbox) -> dict[str, Any]:
    """Return the newest crash record, once there is one."""
    path = until(lambda: box.client.status().crash_record or "")
    record: dict[str, Any] = json.loads(Path(path).read_text())
    return record


def until_generation(box: Sandbox, generation: int) -> Status:
    """Wait until an engine of this generation is ready."""

    def ready() -> Status | None:
        status = box.client.status()
        there = (status.generation, status.state) == (generation, EngineState.READY)
        return status if there else None

    found = until(ready)
    assert found is not None
    return found


def kill(box: Sandbox) -> None:
    """Kill the daemon as nothing can be caught."""
    box.daemons[-1].kill()
    box.daemons[-1].wait(WITHIN_S)


# --- wedged engines ------------------------------------------------------------------------------


def test_an_engine_that_answers_and_computes_nothing_is_replaced(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    box.say(is_working=True)
    began = time.monotonic()
    status = until_generation(box, 2)
    assert time.monotonic() - began < IDLE_S + 10
    assert status.crashes == 1
    assert not psutil.pid_exists(pid)
    record = crash_record(box)
    assert (record["code"], record["pid"], record["cause"]) == ("engine_wedged", pid, "up")
    assert record["evidence"]["answers"] is True
    assert record["evidence"]["n_ubatches"] == 1
    assert record["exit"]["last_lines"][0].startswith("fake engine on")
    until(lambda: causes(box) == ["up", "wedge"])
    assert "llamactl_engine_wedges_total 1.0" in box.metrics()


def test_an_engine_that_wedges_at_once_every_time_ends_in_failed(box: Sandbox) -> None:
    box.start()
    box.up("--fake-wedged", "--fake-ignore-term")
    box.until_state(EngineState.FAILED)
    status = box.client.status()
    assert status.problem is not None
    assert status.problem.code == "engine_wedged"
    assert status.problem.details["idle_s"] >= IDLE_S
    assert status.last_exit is not None
    assert status.last_exit.signal == signal.SIGKILL


def test_an_engine_that_uses_the_processor_is_given_the_long_limit(box: Sandbox) -> None:
    box.env["LLAMACTL_WEDGE_BUSY_S"] = "3"
    box.start()
    began = time.monotonic()
    box.up("--fake-spin")
    until_generation(box, 2)
    assert time.monotonic() - began >= 3
    evidence = crash_record(box)["evidence"]
    assert evidence["still_s"] >= 3
    assert evidence["idle_s"] < IDLE_S


def test_an_engine_that_answers_no_question_is_replaced(box: Sandbox) -> None:
    box.start()
    box.up("--fake-older")
    box.say(answers=False)
    until_generation(box, 2)
    assert crash_record(box)["evidence"]["answers"] is False


def test_an_engine_that_a_person_stopped_is_replaced(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    os.kill(pid, signal.SIGSTOP)
    until_generation(box, 2)
    record = crash_record(box)
    assert record["evidence"]["is_stopped"] is True
    assert record["message"].startswith("the engine is wedged: it is stopped from outside")
    assert record["exit"]["signal"] == signal.SIGKILL


def test_an_older_engine_that_answers_is_left_alone(box: Sandbox) -> None:
    """It says nothing of its work: three times the limit, and it is the same process."""
    box.start()
    pid = box.up("--fake-older")
    box.say(is_working=True)
    left = time.monotonic() + 3 * IDLE_S
    until(lambda: time.monotonic() > left)
    assert (box.engine_pid(), box.client.status().state) == (pid, EngineState.READY)


def test_an_engine_that_computes_slowly_is_left_alone(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    began, n_ubatches = time.monotonic(), 1
    while time.monotonic() < began + 3 * IDLE_S:
        n_ubatches += 1
        box.say(is_working=True, n_ubatches=n_ubatches)
        moved = time.monotonic() + IDLE_S / 2
        until(lambda: time.monotonic() > moved)  # noqa: B023 - used at once
    assert (box.engine_pid(), box.client.status().crashes) == (pid, 0)


def test_a_daemon_that_was_stopped_itself_condemns_nobody(box: Sandbox) -> None:
    """It and its engine were frozen together for longer than the limit."""
    box.env["LLAMACTL_PROBE_S"] = "0.4"
    box.start()
    pid = box.up()
    frozen = [psutil.Process(box.daemons[-1].pid), psutil.Process(pid)]
    box.say(is_working=True)
    for each in frozen:
        each.suspend()
    left = time.monotonic() + 3 * IDLE_S
    until(lambda: time.monotonic() > left)
    for each in reversed(frozen):
        each.resume()
    box.say(is_working=False)
    assert (box.engine_pid(), box.client.status().crashes) == (pid, 0)


def test_a_reconfigure_that_a_wedged_engine_was_asked_for_fails_with_the_reason(
    box: Sandbox,
) -> None:
    box.start()
    box.up()
    os.kill(box.engine_pid(), signal.SIGSTOP)
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.reconfigure(n_ctx=131072), timeout_s=WITHIN_S)
    assert caught.value.code in {"engine_wedged", "engine_unreachable"}
    assert until_generation(box, 2).override is None


# --- crashes -------------------------------------------------------------------------------------


def test_an_engine_that_is_healthy_and_then_dies_every_time_ends_in_failed(box: Sandbox) -> None:
    box.start()
    box.up("--fake-lives-s", "0.3")
    box.until_state(EngineState.FAILED)
    status = box.client.status()
    assert (status.crashes, status.weight_loads) == (3, 3)
    assert status.last_exit is not None
    assert status.last_exit.exit_code == 7
    assert status.last_exit.last_lines[-1] == "fatal: the fake engine dies"
    until(lambda: len(list(box.paths.crashes.iterdir())) == 3)
    record = crash_record(box)
    assert (record["generation"], record["cause"], record["exit"]["exit_code"]) == (3, "crash", 7)
    assert 0.2 < record["uptime_s"] < WITHIN_S
    assert record["geometry"]["n_ctx"] == 16384


def test_a_crash_soon_after_a_change_goes_back_to_the_geometry_before(box: Sandbox) -> None:
    box.start()
    box.up("--fake-reconfigure", "reply-then-die")
    box.client.wait_operation(box.client.reconfigure(n_ctx=131072, n_seq=4), timeout_s=WITHIN_S)
    status = until_generation(box, 2)
    assert status.engine is not None
    assert status.engine.geometry is not None
    assert (status.engine.geometry.n_ctx, status.engine.geometry.n_seq) == (16384, 2)
    assert (status.override, status.loads_avoided) == (None, 1)
    assert status.dropped_override is not None
    assert status.dropped_override.n_ctx == 131072
    until(lambda: causes(box) == ["up", "avoided", "crash"])
    assert ledger(box)[-1]["dropped"]["n_ctx"] == 131072
    assert ledger(box)[-1]["n_ctx"] == 16384


def test_a_port_that_a_stranger_took_meanwhile_is_named_and_waited_for(box: Sandbox) -> None:
    """The retries go on until the budget is gone; the stranger is not touched."""
    box.start()
    pid = box.up()
    box.env["LLAMACTL_BACKOFF_BASE_S"] = "1"
    os.kill(pid, signal.SIGSTOP)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not _binds(stranger, box.port))
        box.until_state(EngineState.FAILED)
        problem = box.client.status().problem
        assert problem is not None
        assert (problem.code, problem.details["pid"]) == ("port_in_use", os.getpid())
    assert box.up() != pid


def _binds(stranger: socket.socket, port: int) -> bool:
    """Try to take the port; return whether somebody else still has it."""
    try:
        stranger.bind(("127.0.0.1", port))
    except OSError:
        return True
    stranger.listen(1)
    return False


# --- what comes about without us -----------------------------------------------------------------


def test_a_wake_is_a_weight_load_in_the_ledger(box: Sandbox) -> None:
    box.start()
    box.up()
    box.say(is_sleeping=True)
    until(lambda: (engine := box.client.status().engine) and engine.is_sleeping)
    box.say(is_working=True, n_ubatches=2)
    waking = time.monotonic() + 0.5
    until(lambda: time.monotonic() > waking)
    box.say(is_sleeping=False, is_working=False, n_weight_loads=2)
    status = until(lambda: (now := box.client.status()).weight_loads == 2 and now)
    assert status
    assert status.engine is not None
    assert (status.engine.is_sleeping, status.engine.n_weight_loads) == (False, 2)
    until(lambda: causes(box) == ["up", "wake"])
    assert ledger(box)[-1]["by"] == "a request"
    assert 0.2 < ledger(box)[-1]["load_s"] < WITHIN_S
    assert "llamactl_engine_wakes_total 1.0" in box.metrics()


def test_a_change_over_the_engines_socket_is_found(box: Sandbox) -> None:
    box.start()
    box.up()
    url = f"http://127.0.0.1:{box.port}/reconfigure"
    httpx.post(url, json={"n_ctx": 131072, "n_seq": 4}).raise_for_status()
    status = until(lambda: (now := box.client.status()).override and now)
    assert status
    assert status.override is not None
    assert (status.override.n_ctx, status.override.by) == (131072, "engine socket")
    assert status.engine is not None
    assert status.engine.geometry is not None
    assert (status.engine.geometry.n_ctx, status.loads_avoided) == (131072, 1)
    until(lambda: causes(box) == ["up", "avoided"])
    assert (ledger(box)[-1]["by"], ledger(box)[-1]["pause_ms"]) == ("engine socket", 79.5)


def test_a_change_of_ours_is_counted_once(box: Sandbox) -> None:
    box.start()
    box.up()
    for n_ctx in (131072, 16384):
        operation = box.client.reconfigure(n_ctx=n_ctx)
        box.client.wait_operation(operation, timeout_s=WITHIN_S)
    seen = time.monotonic() + 1.0
    until(lambda: time.monotonic() > seen)
    status = box.client.status()
    assert status.loads_avoided == 2
    assert status.override is not None
    assert status.override.by != "engine socket"


# --- the daemon's own death ----------------------------------------------------------------------


def test_a_change_goes_on_over_the_death_of_its_daemon(box: Sandbox) -> None:
    """The reply has nobody to go to; the engine's own record tells the next daemon."""
    box.start()
    pid = box.up()
    box.say(slow_s=1.0)
    box.client.reconfigure(n_ctx=131072, n_seq=4)
    until(lambda: box.say()["n_asked"])
    kill(box)
    url = f"http://127.0.0.1:{box.port}/props"
    until(lambda: httpx.get(url).json()["last_reconfigure"])
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
    kill(box)
    box.start()
    assert until_generation(box, 1).loads_avoided == 1, "told once"


def test_a_load_that_outlives_its_daemon_is_in_the_ledger(box: Sandbox) -> None:
    box.start()
    box.client.up(box.request("--fake-load-s", "1.5"))
    until(lambda: box.client.status().engine)
    kill(box)
    box.start()
    until_generation(box, 1)
    until(lambda: box.paths.ledger_file.exists() and causes(box) == ["adopt"])
    assert ledger(box)[0]["load_s"] is None


def test_a_daemon_killed_in_the_middle_of_a_start_leaves_no_second_engine(box: Sandbox) -> None:
    """Whatever it had come to: the next one has exactly one engine, and nothing is left of it."""
    for _ in range(5):
        box.start()
        box.client.up(box.request())
        kill(box)
        box.start()
        box.until_state(EngineState.READY)
        engines = [p for p in box.processes() if "--instance-id" in p.cmdline()]
        assert [engine.pid for engine in engines] == [box.engine_pid()]
        box.client.wait_down(timeout_s=WITHIN_S)
        assert box.leftovers() == []


def test_the_evidence_of_a_wedge_is_found_by_the_next_daemon_too(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    kill(box)
    box.say(is_working=True)
    box.start()
    until_generation(box, 2)
    assert (crash_record(box)["pid"], crash_record(box)["cause"]) == (pid, "adopt")


def test_an_adopted_engine_that_is_stopped_is_found_as_soon(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    kill(box)
    os.kill(pid, signal.SIGSTOP)
    box.start()
    until_generation(box, 2)
    assert not psutil.pid_exists(pid)
    assert crash_record(box)["code"] == "start_stalled"


def test_a_load_is_not_given_up_by_a_daemon_that_was_stopped_itself() -> None:
    box = Sandbox(ready_stall_s=0.5, stop_term_s=1)
    with contextlib.closing(box):
        daemon = psutil.Process(box.start().pid)
        loading = box.client.up(box.request("--fake-load-s", "8"))
        until(lambda: box.client.status().engine)
        daemon.suspend()
        left = time.monotonic() + 6.5
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
    kill(box)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        me = process.identify(stranger.pid)
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


# --- idle ----------------------------------------------------------------------------------------


def test_watching_an_idle_engine_costs_next_to_nothing() -> None:
    """At the default pace: at most half a percent of a core."""
    box = Sandbox()
    del box.env["LLAMACTL_PROBE_S"]
    with contextlib.closing(box):
        daemon = psutil.Process(box.start().pid)
        box.up()
        began, before = time.monotonic(), sum(daemon.cpu_times()[:2])
        until(lambda: time.monotonic() > began + 10)
        used_s = sum(daemon.cpu_times()[:2]) - before
        assert used_s / (time.monotonic() - began) <= 0.005, used_s
