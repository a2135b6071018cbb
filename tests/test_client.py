"""What a command line does: start a daemon, ask it, and get away clean."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineState
from sandbox import WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    from collections.abc import Iterator

UP = """
from llamactl_supervisor.client import Client
from llamactl_supervisor.spawn import spawn_daemon
from llamactl_supervisor.models import UpRequest
with Client() as client:
    spawn_daemon(client.paths)
    client.wait_operation(client.up(UpRequest.model_validate_json({request!r})), timeout_s=30)
    print(client.status().engine.pid)
"""
SPAWN = """
from llamactl_supervisor.client import Client
from llamactl_supervisor.spawn import spawn_daemon
with Client() as client:
    spawn_daemon(client.paths)
    print(client.status().daemon.pid)
"""


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    yield sandbox
    sandbox.close()


def script(box: Sandbox, code: str, **popen: object) -> subprocess.Popen[str]:
    """Run Python as a command line would be run, its output in a pipe."""
    command = [sys.executable, "-W", "error", "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
        command, env=os.environ | box.env, **pipes, **popen
    )
    return started


def test_up_in_a_command_substitution_returns(box: Sandbox) -> None:
    """`$(...)` ends with the last holder of its pipe: no daemon, holder or engine may be one."""
    read_fd, write_fd = os.pipe()
    code = UP.format(request=box.request().model_dump_json())
    with script(box, code, pass_fds=[write_fd]) as command:
        os.close(write_fd)
        out, _ = command.communicate(timeout=WITHIN_S)
    assert out.strip() == str(box.engine_pid())
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
    assert len(box.processes()) == 3
    box.client.wait_down(timeout_s=WITHIN_S)
    assert box.leftovers() == []


def test_two_callers_at_once_get_one_daemon(box: Sandbox) -> None:
    with script(box, SPAWN) as first, script(box, SPAWN) as second:
        said = [command.communicate(timeout=WITHIN_S)[0].strip() for command in (first, second)]
    assert said == [str(box.client.status().daemon.pid)] * 2


def test_a_daemon_that_cannot_start_says_why(box: Sandbox) -> None:
    box.env["LLAMACTL_STOP_TERM_S"] = "soon"
    with script(box, SPAWN) as command:
        out, _ = command.communicate(timeout=WITHIN_S)
    assert command.returncode == 1
    assert "InvalidRequestError: LLAMACTL_STOP_TERM_S='soon'" in out


def test_without_a_daemon_every_call_says_so(box: Sandbox) -> None:
    for call in (box.client.status, box.client.stop, lambda: list(box.client.logs())):
        with pytest.raises(LlamactlError) as caught:
            call()
        assert (caught.value.code, caught.value.exit_code) == ("daemon_unreachable", 4)
        assert str(box.paths.control_socket) in caught.value.message


def test_a_wait_that_is_too_short_leaves_the_operation_alone(box: Sandbox) -> None:
    box.start()
    operation = box.client.up(box.request("--fake-load-s", "2"))
    told: list[str] = []
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(operation, timeout_s=0.1, on_progress=told.append)
    assert (caught.value.code, caught.value.exit_code) == ("timed_out", 6)
    assert told[-1] == "the engine is starting"
    box.client.wait_operation(operation, timeout_s=WITHIN_S)
    assert box.client.status().state is EngineState.READY


def test_a_caller_that_goes_away_does_not_take_its_operation_along(box: Sandbox) -> None:
    box.start()
    code = UP.replace("    spawn_daemon(client.paths)\n", "")
    request = box.request("--fake-load-s", "1")
    with script(box, code.format(request=request.model_dump_json())) as command:
        until(lambda: box.client.status().operation)
        command.kill()
        command.communicate()
    box.until_state(EngineState.READY)


def test_logs_can_be_left(box: Sandbox) -> None:
    box.start()
    box.up()
    with contextlib.closing(box.client.logs(follow=True)) as lines:
        assert "fake engine on" in next(lines)
    assert len(list(box.client.logs(lines=1))) == 1
