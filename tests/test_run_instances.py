"""`llamactl run` beside others: instances, and callers of another place."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import httpx
import pytest
from run_box import COMMAND, LARGE, SMALL, RunBox, owner_pid, stopped
from sandbox import WITHIN_S, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def box() -> Iterator[RunBox]:
    box = RunBox()
    box.start()
    yield box
    box.close()


def test_an_instance_is_an_engine_beside_the_other(box: RunBox) -> None:
    first = box.run(*SMALL).ready()
    second = box.run(*LARGE, options=["--instance", "b"]).ready()
    assert first.props()["context_geometry"]["n_ctx"] == 8192
    assert second.props()["context_geometry"]["n_ctx"] == 16384
    assert (box.paths.runtime / "instances" / "b" / "control.sock").exists()
    assert (box.paths.state / "instances" / "b" / "state.json").exists()
    shown = subprocess.run(
        [*COMMAND[:-1], "--instance", "b", "status", "--json"],
        env=os.environ | box.env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout)["owner"]["pid"] == second.process.pid
    down = [*COMMAND[:-1], "--instance", "b", "down"]
    assert subprocess.run(down, env=os.environ | box.env, check=False).returncode == 0
    assert second.process.wait(WITHIN_S) == 0
    assert first.healthy()


def test_an_instance_leaves_the_addresses_of_the_one_file_alone(tmp_path: Path) -> None:
    """Also where it is there first: they are the other daemon's; the environment gives it some."""
    box, port, own = RunBox(), free_port(), free_port()
    file = tmp_path / "config.toml"
    file.touch(0o600)
    file.write_text(f'[api]\nprobes_listen = "127.0.0.1:{port}"\n')
    box.env["LLAMACTL_CONFIG"] = str(file)
    instance = [*COMMAND[:-1], "--instance", "b"]

    def alive(where: int) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{where}/livez", timeout=WITHIN_S).status_code == 200
        except httpx.TransportError:
            return False

    def run(*words: str, **env: str) -> str:
        whole = os.environ | box.env | env
        return subprocess.run(
            [*instance, *words], env=whole, capture_output=True, text=True, check=True
        ).stdout

    try:
        shim = box.run(*SMALL, options=["--instance", "b"]).ready()
        assert not alive(port)
        box.start()
        assert alive(port)
        told = f"[api] of {file} is for the daemon without an instance"
        assert told in (box.paths.state / "instances/b/logs/daemon.log").read_text()
        assert told in run("config", "show")
        assert json.loads(run("config", "show", "--json"))["left_out"] == ["api"]
        run("down")
        assert shim.process.wait(WITHIN_S) == 0
        env = {"LLAMACTL_API_PROBES_LISTEN": f"127.0.0.1:{own}"}
        box.run(*SMALL, options=["--instance", "b"], env=env).ready()
        assert alive(own)
        assert alive(port)
        run("down")
    finally:
        box.close()


def may(*unshare: str) -> bool:
    """Whether this user may have namespaces of his own."""
    done = subprocess.run(["unshare", *unshare, "true"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.skipif(not may("--pid", "--fork", "--mount-proc"), reason="no namespace to be had")
def test_where_a_daemon_would_end_with_the_caller_none_is_started() -> None:
    """Process 1 takes all others with it; the message has the cure."""
    box = RunBox()
    try:
        inside = ("unshare", "--pid", "--fork", "--mount-proc")
        shim = box.run(*SMALL, prefix=inside)
        assert shim.process.wait(WITHIN_S) == 125
        assert "`llamactl systemd install" in shim.err
        assert "process 1" in shim.err
        assert not box.answers()
    finally:
        box.close()


@pytest.mark.skipif(not may("--mount"), reason="no namespace to be had")
def test_a_caller_with_mounts_of_his_own_is_one_of_us_while_the_files_are(box: RunBox) -> None:
    """As in a service that systemd hardens; the same path with another file is no good."""
    box.run(*SMALL, prefix=("unshare", "--mount")).ready().end()
    other = box.root / "other.gguf"
    other.write_bytes(b"GGUF other")
    over = f'mount --bind {other} {box.model}; exec "$@"'
    shim = box.run(*SMALL, prefix=("unshare", "--mount", "sh", "-c", over, "sh"))
    assert shim.process.wait(WITHIN_S) == 1
    assert f"another mnt namespace, where {box.model} is another file" in shim.err
    until(lambda: owner_pid(box) is None)
    assert box.loads() == ["run"]


@pytest.mark.skipif(not may("--user"), reason="no namespace to be had")
def test_a_caller_with_other_users_is_refused(box: RunBox) -> None:
    shim = box.run(*SMALL, prefix=("unshare", "--user", "--map-root-user"))
    assert shim.process.wait(WITHIN_S) == 1
    assert "another user namespace" in shim.err
    assert stopped(box)


def test_an_instance_of_every_command_has_a_name(box: RunBox) -> None:
    command = [*COMMAND[:-1], "--instance", "../x", "status"]
    done = subprocess.run(
        command, env=os.environ | box.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--instance takes a name" in done.stderr
