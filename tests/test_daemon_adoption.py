"""Engines that outlive their holder or daemon, and those that end meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_supervisor import store
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import (
    EngineState,
    LifecycleOutcome,
    LifecycleResult,
    LoadLine,
)
from sandbox import WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=2, crashes_max=2)
    yield sandbox
    sandbox.close()


def test_a_killed_holder_costs_the_log_and_not_the_engine(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    engine = box.client.status().engine
    assert engine is not None
    assert engine.holder_pid is not None
    os.kill(engine.holder_pid, signal.SIGTERM)
    os.kill(engine.holder_pid, signal.SIGKILL)
    until(lambda: (status := box.client.status().engine) and status.holder_pid is None)
    assert (box.client.status().state, box.engine_pid()) == (EngineState.READY, pid)
    box.client.wait_operation(box.client.reconfigure(n_ctx=131072), timeout_s=WITHIN_S)
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    last = box.client.status().last_exit
    assert last is not None
    assert (last.exit_code, last.signal) == (None, None)
    assert "unknown status" in last.summary
    box.client.wait_down(timeout_s=WITHIN_S)
    assert box.leftovers() == []


def test_a_killed_daemon_leaves_the_engine_and_the_next_adopts_it(box: Sandbox) -> None:
    daemon = box.start()
    pid = box.up()
    box.client.wait_operation(box.client.reconfigure(n_ctx=131072), timeout_s=WITHIN_S)
    daemon.kill()
    daemon.wait(WITHIN_S)
    assert psutil.pid_exists(pid)
    box.start()
    box.until_state(EngineState.READY)
    status = box.client.status()
    assert status.engine is not None
    assert (status.engine.pid, status.engine.adopted, status.generation) == (pid, True, 1)
    assert status.engine.geometry is not None
    assert status.engine.geometry.n_ctx == 131072
    assert status.weight_loads == 1, "an adoption is no load"
    os.kill(pid, signal.SIGKILL)
    until(lambda: box.client.status().generation == 2)
    last = box.client.status().last_exit
    assert last is not None
    assert last.signal == signal.SIGKILL, "the holder's record outlives the daemon"
    box.until_state(EngineState.READY)
    box.client.wait_down(timeout_s=WITHIN_S)
    assert box.leftovers() == []


def test_a_load_goes_on_over_the_death_of_its_daemon(box: Sandbox) -> None:
    daemon = box.start()
    box.client.up(box.request("--fake-load-s", "3"))
    pid = until(lambda: (engine := box.client.status().engine) and engine.pid)
    daemon.kill()
    daemon.wait(WITHIN_S)
    box.start()
    box.until_state(EngineState.READY)
    assert (box.engine_pid(), box.client.status().generation) == (pid, 1)
    (load,) = box.client.ledger().lines
    assert isinstance(load, LoadLine)
    assert (load.cause, load.by) == ("up", f"uid {os.getuid()} pid {os.getpid()}")
    assert load.load_s is not None
    assert load.load_s >= 3.0


def test_a_stop_goes_on_over_the_death_of_its_daemon(box: Sandbox) -> None:
    """The intent was saved before the TERM: the next daemon ends what it finds."""
    daemon = box.start()
    box.up("--fake-ignore-term")
    box.client.stop()
    daemon.kill()
    daemon.wait(WITHIN_S)
    box.start()
    box.until_state(EngineState.STOPPED)
    box.client.wait_down(timeout_s=WITHIN_S)
    assert box.leftovers() == []


def lose_record(box: Sandbox) -> int:
    """Run an engine, then lose its daemon and its holder's record; return its pid."""
    box.start()
    pid = box.up()
    box.kill_daemon()
    for record in box.paths.runtime.glob("engine-*/holder.json"):
        record.unlink()
    return pid


def test_an_engine_that_is_not_provably_ours_is_neither_used_nor_killed(box: Sandbox) -> None:
    """It is named, and no second one is started beside it: not by the daemons to come either."""
    pid = lose_record(box)
    for _ in range(3):
        box.start("--no-resume")
        assert [stranger.pid for stranger in box.client.status().strangers] == [pid]
        problem = box.refused()
        assert (problem.code, problem.exit_code) == ("engine_unproven", 5)
        assert problem.details["pid"] == pid
        box.kill_daemon()
    assert psutil.pid_exists(pid)
    box.start("--no-resume")
    os.kill(pid, signal.SIGKILL)
    until(lambda: not box.client.status().strangers)
    assert box.up() != pid
    assert store.load(box.paths.state_file)[0].unproven == ()


def test_no_stop_succeeds_while_an_engine_may_be_ours(box: Sandbox) -> None:
    pid = lose_record(box)
    daemon = box.start("--no-resume")
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    assert (caught.value.code, caught.value.details["pids"]) == ("engine_unproven", [pid])
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_down(timeout_s=WITHIN_S)
    assert (caught.value.code, caught.value.exit_code) == ("engine_unproven", 5)
    assert daemon.wait(WITHIN_S) == 0, "all that could be done is done"
    assert psutil.pid_exists(pid)
    assert store.load(box.paths.state_file)[0].unproven[0].engine.pid == pid


def test_an_engine_whose_runtime_directory_is_gone_is_not_forgotten(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    box.kill_daemon()
    shutil.rmtree(box.paths.runtime)
    for _ in range(2):
        box.start("--no-resume")
        assert box.refused().code == "engine_unproven"
        box.kill_daemon()
    assert psutil.pid_exists(pid)


@pytest.mark.parametrize("torn", [True, False])
def test_an_engine_is_adopted_on_its_record_where_the_state_is_lost(
    box: Sandbox, *, torn: bool
) -> None:
    box.start()
    pid = box.up()
    box.kill_daemon()
    if torn:
        box.paths.state_file.write_text("{ torn")
    else:
        box.paths.state_file.unlink()
    box.start("--no-resume")
    box.until_state(EngineState.READY)
    status = box.client.status()
    assert (box.engine_pid(), status.strangers, status.weight_loads) == (pid, (), 1)
    assert (status.generation, status.desired) == (1, box.request())
    assert len(box.client.ledger().lines) == 1, "its load is in the ledger already"
    again = box.client.wait_operation(box.client.up(box.request()), timeout_s=WITHIN_S).result
    assert isinstance(again, LifecycleResult)
    assert (again.outcome, again.pid) == (LifecycleOutcome.ALREADY_UP, pid)
    box.client.wait_down(timeout_s=WITHIN_S)
    assert box.leftovers() == []


def test_the_saved_intent_is_resumed_or_left_alone(box: Sandbox) -> None:
    daemon = box.start()
    pid = box.up()
    daemon.kill()
    daemon.wait(WITHIN_S)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not box.processes())
    idle = box.start("--no-resume")
    assert box.client.status().state is EngineState.STOPPED
    idle.kill()
    idle.wait(WITHIN_S)
    box.start()
    box.until_state(EngineState.READY)
    assert box.client.status().generation == 2


def test_an_engine_that_dies_while_no_daemon_lives_leaves_its_record(box: Sandbox) -> None:
    """And takes the geometry with it that it had been given just before."""
    box.start()
    pid = box.up()
    box.client.wait_operation(box.client.reconfigure(n_ctx=131072), timeout_s=WITHIN_S)
    box.kill_daemon()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not box.processes())
    box.start()
    box.until_state(EngineState.READY)
    status = box.client.status()
    assert (status.generation, status.crashes, status.override) == (2, 1, None)
    assert status.dropped_override is not None
    assert status.crash_record is not None
    record = json.loads(Path(status.crash_record).read_text())
    assert (record["pid"], record["exit"]["signal"]) == (pid, signal.SIGKILL)
    assert record["cause"] == "up"
    load = box.client.ledger().lines[-1]
    assert isinstance(load, LoadLine)
    assert (load.cause, load.dropped) == ("crash", status.dropped_override)


def test_what_was_given_up_stays_so_over_the_death_of_its_daemon(box: Sandbox) -> None:
    box.start()
    problem = box.refused("--fake-load-exit", "3")
    box.kill_daemon()
    box.start()
    status = box.client.status()
    assert (status.state, status.generation) == (EngineState.FAILED, 1)
    assert status.problem is not None
    assert status.problem.message == problem.message
    assert box.up() > 0
