"""Engines that wedge, crash, or are changed by others, over real processes and a fake engine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineState
from sandbox import WITHIN_S, Sandbox, until
from supervised import IDLE_S, causes, crash_record, ledger, until_generation

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=1, crashes_max=2, wedge_idle_s=IDLE_S)
    yield sandbox
    sandbox.close()


# --- wedged engines ------------------------------------------------------------------------------


def test_an_engine_that_answers_and_computes_nothing_is_replaced(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    box.say(is_working=True)
    status = until_generation(box, 2)
    assert status.crashes == 1
    assert not psutil.pid_exists(pid)
    record = crash_record(box)
    assert (record["code"], record["pid"], record["cause"]) == ("engine_wedged", pid, "up")
    assert record["evidence"]["answers"] is True
    assert record["evidence"]["n_ubatches"] == 1
    assert record["exit"]["last_lines"][0].startswith("fake engine on")
    assert status.last_exit is not None
    assert status.last_exit.reason == record["message"]
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
        moved = time.monotonic() + IDLE_S / 5
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


def test_a_prefill_that_was_suspended_with_its_daemon_goes_on(box: Sandbox) -> None:
    """With limits as small as they come: the time in which nobody ran is nobody's silence."""
    box.env["LLAMACTL_WEDGE_BUSY_S"] = "600"
    box.start()
    pid = box.up("--fake-spin")
    for _ in range(3):
        spun = time.monotonic() + IDLE_S / 2
        until(lambda: time.monotonic() > spun)  # noqa: B023 - used at once
        frozen = box.processes()
        for each in frozen:
            each.suspend()
        left = time.monotonic() + 2.5 * IDLE_S
        until(lambda: time.monotonic() > left)  # noqa: B023 - used at once
        for each in frozen:
            each.resume()
    spun = time.monotonic() + IDLE_S / 2
    until(lambda: time.monotonic() > spun)
    assert (box.engine_pid(), box.client.status().crashes) == (pid, 0)


def test_a_wedge_is_found_after_a_shortage_of_files(box: Sandbox) -> None:
    """What cannot be looked at is neither healthy nor wedged; afterwards it is looked at again."""
    daemon = psutil.Process(box.start().pid)
    pid = box.up()
    limits = daemon.rlimit(psutil.RLIMIT_NOFILE)
    daemon.rlimit(psutil.RLIMIT_NOFILE, (4, limits[1]))
    until(lambda: box.daemon_log().count("Too many open files"))
    box.say(is_working=True)
    left = time.monotonic() + 3 * IDLE_S
    until(lambda: time.monotonic() > left)
    assert psutil.pid_exists(pid)
    said = [line for line in box.daemon_log().splitlines() if "engine: " in line]
    assert len(said) <= 2, "each complaint once"
    daemon.rlimit(psutil.RLIMIT_NOFILE, limits)
    until_generation(box, 2)
    assert crash_record(box)["code"] == "engine_wedged"


def test_a_change_that_the_engine_died_of_is_not_awaited(box: Sandbox) -> None:
    box.start()
    box.up("--fake-reconfigure", "die")
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.reconfigure(n_ctx=131072), timeout_s=WITHIN_S)
    assert "may still make the change" not in (caught.value.hint or "")


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
    change = {"n_ctx": 131072, "n_seq": 4}
    httpx.post(url, json=change, timeout=WITHIN_S).raise_for_status()
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


# --- idle ----------------------------------------------------------------------------------------


def test_watching_an_idle_engine_costs_next_to_nothing() -> None:
    """Nothing spins: four times what `make bench-overheads` has as its target."""
    box = Sandbox()
    del box.env["LLAMACTL_PROBE_S"]
    with contextlib.closing(box):
        daemon = psutil.Process(box.start().pid)
        box.up()
        began, before = time.monotonic(), sum(daemon.cpu_times()[:2])
        until(lambda: time.monotonic() > began + 10)
        used_s = sum(daemon.cpu_times()[:2]) - before
        assert used_s / (time.monotonic() - began) <= 0.02, used_s


def test_a_load_that_is_stopped_midway_is_aborted_in_the_ledger(box: Sandbox) -> None:
    box.start()
    box.client.up(box.request("--fake-load-s", "60"))
    until(lambda: box.client.status().engine)
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    (line,) = box.client.ledger().lines
    assert line.kind == "load"
    assert (line.loaded, line.aborted, line.cause) == (False, True, "up")
