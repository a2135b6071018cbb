"""What a dead daemon left behind: cleared away, and an engine that is to go on is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from llamactl_supervisor import store
from llamactl_supervisor.models import Intent
from sandbox import WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    from collections.abc import Iterator

UNIT = "llamactl.service"


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=1)
    yield sandbox
    sandbox.close()


def reap(box: Sandbox, *words: str) -> tuple[int, str]:
    """Run it; return its exit code and its log."""
    done = subprocess.run(
        [sys.executable, "-m", "llamactl_supervisor", "reap", *words],
        env=box.env, stderr=subprocess.PIPE, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def reap_json(box: Sandbox, *before: str, stdout: Any = subprocess.PIPE) -> Any:
    """Run `llamactl reap --json`, behind the words `before`."""
    return subprocess.run(
        [*before, sys.executable, "-m", "llamactl_cli", "reap", "--json"],
        env=box.env | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=stdout, stderr=subprocess.PIPE, timeout=WITHIN_S, check=False,
    )  # fmt: skip


def result(box: Sandbox) -> Any:
    """Return what it prints."""
    done = reap_json(box)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def crashed(box: Sandbox, *fake: str) -> int:
    """Kill a daemon whose engine is ready; return the engine's pid."""
    daemon = box.start()
    pid = box.up(*fake)
    daemon.kill()
    daemon.wait(WITHIN_S)
    return pid


def stopping(box: Sandbox) -> int:
    """Kill a daemon that has begun to stop its engine; return the engine's pid."""
    daemon = box.start()
    pid = box.up("--fake-ignore-term")
    daemon.send_signal(signal.SIGTERM)
    until(lambda: store.load(box.paths.state_file)[0].intent is Intent.DOWN)
    daemon.kill()
    daemon.wait(WITHIN_S)
    return pid


def pretend_systemd(box: Sandbox, *jobs: str) -> None:
    """Have `systemctl list-jobs` say this, and this be an ExecStopPost= after a timeout."""
    systemctl = box.root / "bin" / "systemctl"
    systemctl.parent.mkdir()
    said = "\n".join(jobs)
    systemctl.write_text(f'#!/bin/sh\n[ "$1" = list-jobs ] || exit 1\ncat <<END\n{said}\nEND\n')
    systemctl.chmod(0o755)
    box.env |= {"PATH": f"{systemctl.parent}:/usr/bin:/bin", "SERVICE_RESULT": "timeout"}


def test_after_a_crash_the_engine_is_left_to_the_next_daemon(box: Sandbox) -> None:
    pid = crashed(box)
    code, said = reap(box)
    assert code == 0
    assert f"engine pid={pid} is to go on" in said
    box.start()
    until(lambda: box.client.status().engine)
    assert box.engine_pid() == pid


def test_a_stop_that_the_daemon_did_not_live_to_end_is_ended(box: Sandbox) -> None:
    pid = stopping(box)
    code, said = reap(box)
    assert code == 0
    assert f"engine pid={pid} does not end: KILL" in said
    assert box.leftovers() == []
    assert not box.paths.control_socket.exists()


def test_an_engine_that_is_about_to_end_is_waited_for(box: Sandbox) -> None:
    pid = stopping(box)
    box.env["LLAMACTL_STOP_TERM_S"] = "60"
    child = subprocess.Popen(
        [sys.executable, "-m", "llamactl_supervisor", "reap"], env=box.env, stderr=subprocess.PIPE
    )
    assert child.stderr is not None
    assert f"engine pid={pid} was to be stopped: waiting 15 s".encode() in child.stderr.readline()
    psutil.Process(pid).kill()
    with child.stderr:
        assert f"engine pid={pid} is gone".encode() in child.stderr.readline()
    assert child.wait(WITHIN_S) == 0
    assert box.leftovers() == []


def test_an_engine_that_is_not_provably_ours_is_left_alone(box: Sandbox) -> None:
    pid = crashed(box)
    box.paths.state_file.write_text("{ torn")
    for _ in range(2):
        code, said = reap(box)
        assert code == 0
        assert f"unproven engine pid={pid}" in said
        assert psutil.pid_exists(pid)
        [directory] = box.paths.runtime.glob("engine-*")
        assert (directory / "engine.sock").exists()
        (directory / "holder.json").unlink(missing_ok=True)


def test_a_broken_configuration_does_not_keep_an_engine_from_its_end(box: Sandbox) -> None:
    pid = stopping(box)
    file = box.root / "config" / "llamactl" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[daemon]\nstop_trm_s = 3\n")
    code, said = reap(box)
    assert code == 0
    assert f"left out: file {file}: " in said
    assert f"engine pid={pid} was to be stopped: waiting 1 s" in said
    assert box.leftovers() == []


def test_beside_a_daemon_it_is_refused(box: Sandbox) -> None:
    daemon = box.start()
    pid = box.up()
    code, said = reap(box)
    assert code == 5
    assert f"a daemon (pid {daemon.pid})" in said
    assert box.engine_pid() == pid


def test_the_engine_of_a_daemon_that_hung_in_a_stop_is_stopped(box: Sandbox) -> None:
    """It recorded nothing: that this was a stop is known to systemd alone."""
    pid = crashed(box, "--fake-ignore-term")
    pretend_systemd(box, "12 other.service start waiting", f"17 {UNIT} stop running")
    code, said = reap(box, "--unit", UNIT)
    assert code == 0
    assert f"engine pid={pid} was to be stopped" in said
    assert box.leftovers() == []
    assert store.load(box.paths.state_file)[0].intent is Intent.DOWN


def test_such_an_engine_is_asked_to_end_first(box: Sandbox) -> None:
    crashed(box)
    box.env["LLAMACTL_STOP_TERM_S"] = "60"
    pretend_systemd(box, f"17 {UNIT} stop running")
    code, said = reap(box, "--unit", UNIT)
    assert code == 0
    assert "KILL" not in said
    assert "fake engine ends" in box.paths.engine_log.read_text()


@pytest.mark.parametrize("job", [f"17 {UNIT} restart running", "17 other.service stop running", ""])
def test_the_engine_of_a_daemon_that_hung_otherwise_goes_on(box: Sandbox, job: str) -> None:
    pid = crashed(box)
    pretend_systemd(box, job)
    assert reap(box, "--unit", UNIT)[0] == 0
    assert psutil.pid_exists(pid)


def test_a_daemon_that_ended_well_knew_what_it_left(box: Sandbox) -> None:
    pid = crashed(box)
    pretend_systemd(box, f"17 {UNIT} stop running")
    box.env["SERVICE_RESULT"] = "success"
    assert reap(box, "--unit", UNIT)[0] == 0
    assert psutil.pid_exists(pid)


def test_a_systemd_that_does_not_answer_stops_nothing(box: Sandbox) -> None:
    pid = crashed(box)
    box.env |= {"PATH": "/nowhere", "SERVICE_RESULT": "timeout"}
    code, said = reap(box, "--unit", UNIT)
    assert code == 0
    assert "cannot be known" in said
    assert psutil.pid_exists(pid)


def test_nothing_is_done_where_nothing_is_left(box: Sandbox) -> None:
    assert reap(box) == (0, "")
    assert result(box) == {"ended": [], "left": [], "removed": []}


def test_with_json_the_result_is_what_was_ended_and_removed(box: Sandbox) -> None:
    pid = stopping(box)
    [directory] = box.paths.runtime.glob("engine-*")
    removed = [str(directory), str(box.paths.control_socket)]
    assert result(box) == {"ended": [pid], "left": [], "removed": removed}
    assert not directory.exists()


def test_with_json_what_goes_on_is_named_and_a_result_that_nobody_takes_fails(
    box: Sandbox,
) -> None:
    pid = crashed(box)
    with Path("/dev/full").open("w") as full:
        done = reap_json(box, stdout=full)
    assert done.returncode == 1
    told = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (told["code"], f"left=[{pid}]" in told["message"]) == ("os_error", True)
    assert reap_json(box, "sh", "-c", 'exec "$@" >&-', "-").returncode == 1
    assert result(box) == {"ended": [], "left": [pid], "removed": []}
    assert psutil.pid_exists(pid)


def test_it_imports_no_server_and_no_http_client() -> None:
    script = "import sys, llamactl_supervisor.__main__, llamactl_supervisor.reap as r\n"
    script += "print([m for m in ('fastapi', 'uvicorn', 'httpx', 'prometheus_client') "
    script += "if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
