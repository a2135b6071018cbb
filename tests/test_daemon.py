"""Real daemons with real holders over a fake engine: what the supervisor promises, end to end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_supervisor import ledger
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import (
    AvoidedLine,
    EngineState,
    Intent,
    LifecycleOutcome,
    LifecycleResult,
    LoadLine,
    Receipt,
    Totals,
)
from sandbox import FAKE_ENGINE, WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=2, crashes_max=2)
    yield sandbox
    sandbox.close()


def test_up_ready_reconfigure_down_leaves_nothing(box: Sandbox) -> None:
    daemon = box.start()
    pid = box.up()
    assert psutil.Process(pid).parent() != psutil.Process(daemon.pid), "the holder is its parent"
    assert os.getsid(pid) == pid
    operation = box.client.reconfigure(n_ctx=131072, n_seq=4)
    receipt = box.client.wait_operation(operation, timeout_s=WITHIN_S).result
    assert isinstance(receipt, Receipt)
    assert (receipt.geometry.n_ctx, receipt.geometry.n_seq) == (131072, 4)
    assert receipt.model_dump()["something_newer"] == {"kept": True}
    status = box.client.status()
    assert status.engine is not None
    assert (status.engine.pid, status.engine.geometry) == (pid, receipt.geometry)
    assert (status.weight_loads, status.loads_avoided) == (1, 1)
    load, avoided = box.client.ledger().lines
    assert isinstance(load, LoadLine)
    assert isinstance(avoided, AvoidedLine)
    assert (load.cause, load.loaded, avoided.geometry) == ("up", True, receipt.geometry)
    assert box.client.ledger(limit=1).lines == box.client.ledger(since=avoided.at).lines
    assert box.client.ledger(since=avoided.at).lines == (avoided,)
    stopped = box.client.wait_down(timeout_s=WITHIN_S)
    assert stopped is not None
    assert isinstance(stopped.result, LifecycleResult)
    assert stopped.result.outcome == "stopped"
    assert daemon.wait(WITHIN_S) == 0
    assert box.leftovers() == []
    found = ledger.read(box.paths.ledger_file)
    assert found.lines[:2] == (load, avoided)
    (carried,) = found.lines[2:]
    assert carried.kind == "carried"
    assert found.totals == Totals(weight_loads=1, loads_avoided=1)


def test_everything_is_private(box: Sandbox) -> None:
    box.start()
    box.up()
    for path in (*box.paths.runtime.rglob("*"), *box.paths.state.rglob("*"), box.paths.runtime):
        if path.name != "engine.sock":  # the engine's own umask; its directory is 0700
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_not_answered(box: Sandbox) -> None:
    """Even where the modes have been opened by hand, the socket knows whom it talks to."""
    box.start()
    for path, mode in ((box.root, 0o711), (box.paths.runtime, 0o711)):
        path.chmod(mode)
    box.paths.control_socket.chmod(0o666)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            box.client.status()
        except LlamactlError as exc:
            os._exit(exc.exit_code)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert box.answers()


def test_a_second_up_is_already_up_or_a_conflict(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    again = box.client.wait_operation(box.client.up(box.request()), timeout_s=WITHIN_S).result
    assert isinstance(again, LifecycleResult)
    assert (again.outcome, again.pid) == (LifecycleOutcome.ALREADY_UP, pid)
    with pytest.raises(LlamactlError) as caught:
        box.client.up(box.request(n_ctx=8192))
    assert (caught.value.code, caught.value.exit_code) == ("conflict", 5)


def test_a_second_daemon_is_refused_and_names_the_first(box: Sandbox) -> None:
    first = box.start()
    assert box.spawn().wait(WITHIN_S) == 5
    assert f"daemon_running: a daemon (pid {first.pid})" in box.daemon_log()
    assert box.answers()


def test_a_second_daemon_leaves_the_log_of_the_first_where_it_is(box: Sandbox) -> None:
    """Though it is full, and the second one too writes there: that it is refused."""
    box.paths.create()
    log = box.paths.daemon_log

    def serve() -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            command = [sys.executable, "-m", "llamactl_supervisor", "serve"]
            box.daemons.append(subprocess.Popen(command, env=os.environ | box.env, stderr=out))
        return box.daemons[-1]

    serve()
    until(box.answers)
    with log.open("ab") as full:
        full.write(b"x" * 70000 + b"\n")
    inode = log.stat().st_ino
    box.env["LLAMACTL_LOG_BYTES_MAX"] = "65536"
    assert serve().wait(WITHIN_S) == 5
    assert log.stat().st_ino == inode
    assert sorted(path.name for path in log.parent.iterdir()) == ["daemon.log"]
    assert log.read_text().count("daemon_running") == 1
    box.client.wait_down(timeout_s=WITHIN_S)


def test_a_stopped_engine_cannot_be_reconfigured(box: Sandbox) -> None:
    box.start()
    with pytest.raises(LlamactlError) as caught:
        box.client.reconfigure(n_ctx=8192)
    assert (caught.value.code, caught.value.exit_code) == ("engine_stopped", 3)
    with pytest.raises(LlamactlError) as caught:
        box.client.start()
    assert (caught.value.code, caught.value.exit_code) == ("no_spec", 3)


def test_stop_start_restart_keep_the_live_geometry(box: Sandbox) -> None:
    box.start()
    first = box.up()
    operation = box.client.reconfigure(n_ctx=131072, n_seq=4)
    box.client.wait_operation(operation, timeout_s=WITHIN_S)
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    assert (box.client.status().state, box.client.status().intent) == ("stopped", Intent.DOWN)
    for command in (box.client.start, box.client.restart):
        box.client.wait_operation(command(), timeout_s=WITHIN_S)
        status = box.client.status()
        assert status.engine is not None
        assert status.engine.pid != first
        assert status.engine.geometry is not None
        assert (status.engine.geometry.n_ctx, status.engine.geometry.n_seq) == (131072, 4)
    assert box.client.status().weight_loads == 3


def test_who_asked_and_has_gone_is_told_nothing(box: Sandbox) -> None:
    """Its end of the pipe is closed before the daemon finds that another one runs."""
    box.start()
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    command = [sys.executable, "-m", "llamactl_supervisor", "serve", "--problem-fd", str(write_fd)]
    ended = subprocess.run(
        command,
        env=os.environ | box.env,
        pass_fds=(write_fd,),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write_fd)
    assert "daemon_running" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 5


def test_every_refusal_is_passed_on_with_its_reason(box: Sandbox) -> None:
    reasons = "invalid_geometry cache_type_change fan_out_in_progress reconfigure_in_progress "
    reasons += "insufficient_memory media_held rope_scaling_change page_out_failed "
    reasons += "context_build_failed"
    box.start()
    pid = box.up("--fake-refuse", *reasons.split())
    for reason in reasons.split():
        operation = box.client.reconfigure(n_ctx=131072)
        with pytest.raises(LlamactlError) as caught:
            box.client.wait_operation(operation, timeout_s=WITHIN_S)
        assert (caught.value.code, caught.value.exit_code) == (reason, 5)
        assert caught.value.details["bytes_needed"] == 2**40
        status = box.client.status()
        assert (status.state, status.override, box.engine_pid()) == (EngineState.READY, None, pid)
    text = box.metrics()
    assert 'llamactl_reconfigures_total{outcome="failed"} 9.0' in text
    assert 'llamactl_engine_state{state="ready"} 1.0' in text


def test_a_reason_of_a_newer_engine_is_still_a_refusal(box: Sandbox) -> None:
    box.start()
    box.up("--fake-refuse", "moon_phase")
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.reconfigure(n_ctx=131072), timeout_s=WITHIN_S)
    assert (caught.value.code, caught.value.exit_code) == ("reconfigure_refused", 5)
    assert caught.value.details["reason"] == "moon_phase"


def test_a_garbled_receipt_is_an_error_and_the_engine_goes_on(box: Sandbox) -> None:
    box.start()
    box.up("--fake-reconfigure", "garbage")
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.reconfigure(n_ctx=131072), timeout_s=WITHIN_S)
    assert caught.value.code == "engine_answer_broken"
    assert box.client.status().state is EngineState.READY


def test_a_lost_receipt_is_settled_by_asking_the_engine(box: Sandbox) -> None:
    """The change was made, the answer never came: the engine's own record is the receipt."""
    box.start()
    box.up("--fake-reconfigure", "silent")
    operation = box.client.reconfigure(n_ctx=131072, n_seq=4)
    receipt = box.client.wait_operation(operation, timeout_s=WITHIN_S).result
    assert isinstance(receipt, Receipt)
    assert receipt.outcome == "applied"
    assert box.client.status().override is not None


def test_an_engine_that_dies_in_a_reconfigure_fails_it_and_is_loaded_again(box: Sandbox) -> None:
    box.start()
    first = box.up("--fake-reconfigure", "die")
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.reconfigure(n_ctx=131072), timeout_s=WITHIN_S)
    assert caught.value.code == "engine_exited"
    assert caught.value.message.endswith("; it is being loaded again")
    until(lambda: box.client.status().generation == 2)
    box.until_state(EngineState.READY)
    assert box.engine_pid() != first


def test_a_load_that_fails_says_so_with_its_last_words(box: Sandbox) -> None:
    box.start()
    problem = box.refused("--fake-load-exit", "3")
    assert problem.code == "engine_exited"
    assert "exited with status 3 while it was starting" in problem.message
    assert problem.details["last_lines"][-1] == "error: this model cannot be loaded"
    status = box.client.status()
    assert status.state is EngineState.FAILED
    assert status.last_exit is not None
    assert status.last_exit.exit_code == 3
    assert box.up() > 0, "a failed engine can be asked for again, and otherwise"


def test_an_engine_that_cannot_be_run_is_named(box: Sandbox) -> None:
    box.start()
    missing = box.request().model_copy(update={"engine_path": "/nowhere/llama-server"})
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.up(missing), timeout_s=WITHIN_S)
    assert caught.value.code == "file_unreadable"
    assert "/nowhere/llama-server cannot be read: No such file" in caught.value.message
    box.model.chmod(0o600)
    unrunnable = box.request().model_copy(update={"engine_path": str(box.model)})
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.up(unrunnable), timeout_s=WITHIN_S)
    assert "Permission denied" in caught.value.message


def test_a_port_in_use_names_its_holder(box: Sandbox) -> None:
    box.start()
    with socket.create_server(("127.0.0.1", box.port)):
        problem = box.refused()
    assert (problem.code, problem.exit_code) == ("port_in_use", 5)
    assert problem.details["pid"] == os.getpid()
    assert f"pid {os.getpid()}" in problem.message


def test_a_slow_load_is_waited_for_and_a_silent_one_is_not() -> None:
    """The stall limit is far below the load: the dots it writes keep it alive."""
    box = Sandbox(ready_stall_s=2.5, ready_poll_s=0.4, stop_term_s=2)
    with contextlib.closing(box):
        box.start()
        box.up("--fake-load-s", "5")
        box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
        problem = box.refused("--fake-never-ready")
        assert (problem.code, problem.exit_code) == ("start_stalled", 6)
        assert box.client.status().state is EngineState.FAILED
        assert box.client.status().engine is None


@pytest.mark.parametrize("fake", [("--fake-garbage",), ("--fake-instance", "somebody-else")])
def test_an_engine_that_does_not_prove_itself_is_not_ready(fake: tuple[str, ...]) -> None:
    box = Sandbox(ready_stall_s=1, ready_poll_s=0.4, stop_term_s=2)
    with contextlib.closing(box):
        box.start()
        assert box.refused(*fake).code == "start_stalled"


def test_a_crashed_engine_is_loaded_again_and_a_crash_loop_ends(box: Sandbox) -> None:
    box.start()
    box.up()
    for generation in (2, 3):
        os.kill(box.engine_pid(), signal.SIGKILL)
        until(lambda: box.client.status().generation == generation)  # noqa: B023 - used at once
        box.until_state(EngineState.READY)
    os.kill(box.engine_pid(), signal.SIGKILL)
    box.until_state(EngineState.FAILED)
    status = box.client.status()
    assert (status.intent, status.crashes, status.weight_loads) == (Intent.UP, 3, 3)
    assert status.last_exit is not None
    assert status.last_exit.signal == signal.SIGKILL
    assert status.last_exit.last_lines[0].startswith("fake engine on")
    assert "SIGKILL" in status.last_exit.summary
    box.client.wait_down(timeout_s=WITHIN_S)
    assert box.leftovers() == []


def test_an_engine_that_ignores_term_is_killed_in_bounded_time(box: Sandbox) -> None:
    box.start()
    box.up("--fake-ignore-term")
    began = time.monotonic()
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    assert time.monotonic() - began >= 2.0
    last = box.client.status().last_exit
    assert last is not None
    assert last.signal == signal.SIGKILL


def test_a_stop_during_a_load_supersedes_it(box: Sandbox) -> None:
    box.start()
    loading = box.client.up(box.request("--fake-load-s", "60"))
    until(lambda: box.client.status().engine)
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(loading, timeout_s=WITHIN_S)
    assert caught.value.code == "superseded"


def test_a_change_that_is_made_although_a_stop_came_is_told_and_kept(box: Sandbox) -> None:
    box.start()
    box.up("--fake-reconfigure-s", "0.5", "--fake-ignore-term")
    changing = box.client.reconfigure(n_ctx=32768)
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    ended = box.client.wait_operation(changing, timeout_s=WITHIN_S)
    assert isinstance(ended.result, Receipt)
    assert ended.result.outcome == "applied"
    kept = box.client.status().override
    assert kept is not None
    assert kept.n_ctx == 32768


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_term_and_int_are_a_full_stop(box: Sandbox, number: signal.Signals) -> None:
    daemon = box.start()
    box.up()
    daemon.send_signal(number)
    assert daemon.wait(WITHIN_S) == 0
    assert box.leftovers() == []


def test_secrets_are_in_no_argv_log_or_status(box: Sandbox) -> None:
    keys = box.root / "keys"
    keys.write_text("hunter2-secret\n")
    box.start()
    spec = box.request().spec.model_copy(update={"api_key_file": str(keys)})
    request = box.request().model_copy(update={"spec": spec})
    box.client.wait_operation(box.client.up(request), timeout_s=WITHIN_S)
    shown = [box.client.status().model_dump_json(), box.daemon_log(), *box.client.logs()]
    shown += [" ".join(process.cmdline()) for process in box.processes()]
    shown += [path.read_text() for path in box.paths.state.rglob("*") if path.is_file()]
    assert not [text for text in shown if "hunter2-secret" in text]
    assert str(FAKE_ENGINE) in "".join(shown)
