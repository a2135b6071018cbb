"""A change that its caller has given up is not made: it was told that it was not."""

from __future__ import annotations

import shutil
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import httpx
import pytest
from llamactl_supervisor import asking
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineState, Operation
from llamactl_supervisor.transport import NOT_BEGUN, Transport
from sandbox import FAKE_ENGINE, WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=2)
    yield sandbox
    sandbox.close()


def serves_on(box: Sandbox, pid: int) -> None:
    """Assert that nothing was done: whatever was asked before this change would be done by now."""
    box.client.wait_operation(box.client.reconfigure(n_ctx=32768), timeout_s=WITHIN_S)
    assert (box.client.status().state, box.engine_pid()) == (EngineState.READY, pid)


def test_what_a_stopped_daemon_was_asked_is_not_done_once_it_goes_on(box: Sandbox) -> None:
    daemon, pid = box.start(), box.up()
    daemon.send_signal(signal.SIGSTOP)
    for path in ("/v1/stop", "/v1/restart", "/v1/down"):
        with pytest.raises(LlamactlError) as caught:
            Transport(box.paths).call(Operation, "POST", path, timeout_s=0.3)
        assert caught.value.exit_code == 4
        assert NOT_BEGUN in caught.value.message
    daemon.send_signal(signal.SIGCONT)
    serves_on(box, pid)


def test_what_a_stopped_daemon_is_asked_by_one_who_hangs_up_is_not_done(box: Sandbox) -> None:
    """Whoever he is: no header tells how long he would have waited."""
    daemon, pid = box.start(), box.up()
    daemon.send_signal(signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(box.paths.control_socket))
        caller.sendall(b"POST /v1/stop HTTP/1.1\r\nHost: llamactl\r\nContent-Length: 0\r\n\r\n")
    daemon.send_signal(signal.SIGCONT)
    serves_on(box, pid)


def test_what_expires_on_its_way_through_the_daemon_is_not_begun(box: Sandbox) -> None:
    engine = box.root / "engine"
    shutil.copy(FAKE_ENGINE, engine)
    box.start()
    request = box.request().model_copy(update={"engine_path": str(engine)})
    box.client.wait_operation(box.client.up(request), timeout_s=WITHIN_S)
    pid = box.engine_pid()
    slow = f'case " $* " in *print-args-json*) sleep 1;; esac\nexec {FAKE_ENGINE} "$@"\n'
    new = engine.with_suffix(".new")
    new.write_text(f"#!/bin/sh\n{slow}")
    new.chmod(0o755)
    new.replace(engine)
    soon = time.clock_gettime(time.CLOCK_BOOTTIME) + 0.5
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(box.paths.control_socket)), timeout=WITHIN_S
    ) as client:
        answer = client.post("http://llamactl/v1/restart", headers={asking.EXPIRES: f"{soon}"})
    assert answer.json()["code"] == "request_expired"
    serves_on(box, pid)


def test_a_daemon_that_dies_in_the_middle_of_a_change_may_have_made_it(box: Sandbox) -> None:
    daemon = box.start()
    box.up()
    box.say(slow_s=30)
    operation = box.client.reconfigure(n_ctx=131072)
    daemon.kill()
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(operation, timeout_s=WITHIN_S)
    assert caught.value.exit_code == 4
    assert "the reconfigure that was under way may still be done" in caught.value.message


def test_a_daemon_that_dies_over_a_change_leaves_it_open_what_came_of_it(box: Sandbox) -> None:
    daemon = box.start()
    box.up()
    daemon.send_signal(signal.SIGSTOP)
    killer = threading.Timer(0.5, daemon.kill)
    killer.start()
    with pytest.raises(LlamactlError) as caught:
        box.client.stop()
    killer.join()
    assert caught.value.exit_code == 4
    assert "may be done or not" in caught.value.message
    until(lambda: daemon.poll() is not None)
