"""`up` and `down`: from nothing to an engine and back, with the fake engine under a real daemon."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from cli_home import COMMAND, FAKE_ENGINE, Home, fresh_home
from llamactl_builder import build as builder
from llamactl_builder import models
from llamactl_builder.progress import Progress, ProgressCallback
from llamactl_cli import remains

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


def runs(pid: int) -> bool:
    """Whether the process does anything any more: a daemon that we spawned is ours to reap."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_up_says_what_it_did_and_a_second_one_that_nothing_was_to_do(home: Home) -> None:
    ran = home.run(*home.up_words())
    assert ran.code == 0
    assert ran.err.startswith("starting the daemon\n")
    rows = ran.rows
    assert rows["engine"].startswith("ready, pid ")
    assert rows["url"] == f"http://127.0.0.1:{home.port}"
    assert rows["model"] == str(home.model)
    assert rows["context"] == "16384 tokens: 2 slots of 8192"
    assert rows["daemon"].endswith("started")
    assert rows["next"] == "llamactl status"
    assert ran.out.splitlines()[-1].strip() == "llamactl down"

    second = home.run("--json", *home.up_words())
    again = second.result
    assert (second.code, again["outcome"]) == (0, "already_up")
    assert f"pid {again['pid']}," in rows["engine"]
    assert again["daemon_started"] is False
    assert again["steps"] == []
    assert again["geometry"]["n_ctx_seq"] == 8192


def test_up_with_the_geometry_of_before_does_not_pass_for_the_live_one(home: Home) -> None:
    home.up()
    assert home.run("reconfigure", "-c", "64k").code == 0
    kept = home.run(*home.up_words())
    assert (kept.code, kept.rows["engine"].split(",")[0]) == (0, "already up")
    assert kept.rows["drift"].startswith("n_ctx is 65536, asked: 16384 (set live ")
    asked = home.run(*home.up_words(), "-c", "16k", "--json").error
    assert asked["code"] == "conflict"
    assert "n_ctx is 65536, asked for 16384" in asked["message"]
    assert "llamactl reconfigure" in asked["hint"]
    same = home.run(*home.up_words(), "-c", "64k", "--json")
    assert (same.code, same.result["outcome"]) == (0, "already_up")


def test_up_reports_what_the_daemon_says_that_could_not_start(home: Home) -> None:
    home.paths.runtime.mkdir(mode=0o755)
    (home.paths.runtime / "somebody's").touch()
    ran = home.run(*home.up_words())
    assert (ran.code, ran.out) == (5, "")
    told = f"llamactl: {home.paths.runtime} is in use and others may enter it"
    assert ran.err.splitlines()[1] == told
    assert ran.err.count("others may enter it") == 1
    assert home.run(*home.up_words(), "--json").error["code"] == "insecure_directory"
    home.paths.runtime.chmod(0o700)


def test_another_request_is_refused_and_names_each_differing_field(home: Home) -> None:
    pid = home.up()["pid"]
    words = ("-c", "32k", "-np", "4", "--kv-unified")
    ran = home.run(*home.up_words()[:5], "--port", "1", *words)
    assert (ran.code, ran.out) == (5, "")
    for said in (
        "n_ctx is 16384, asked for 32768",
        "n_seq is 2, asked for 4",
        "kv_unified is None, asked for True",
        f"port is {home.port}, asked for 1",
    ):
        assert said in ran.err
    assert "model" not in ran.err
    refused = home.run(*home.up_words()[:5], "--port", "1", *words, "--json")
    assert refused.error["code"] == "conflict"
    assert home.run("status", "--json").result["engine"]["pid"] == pid


def test_the_geometry_of_up_counts_per_slot_and_in_thousands(home: Home) -> None:
    up = home.run(*home.up_words(), "--per-slot", "4k", "-np", "3", "--json").result
    assert up["geometry"]["n_ctx"] == 12288
    assert up["geometry"]["n_seq"] == 3


def test_up_builds_and_fetches_what_is_missing_and_says_so(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ensure_engine(*, progress: ProgressCallback, **_: object) -> builder.EngineBuild:
        for done in range(3):
            progress(Progress("compiling", done, 2))
        return builder.EngineBuild(FAKE_ENGINE, "key", False, 1.0, True)

    def ensure_model(progress: ProgressCallback) -> Path:
        progress(Progress("fetching the model"))
        return home.model

    monkeypatch.setattr(builder, "ensure_engine", ensure_engine)
    monkeypatch.setattr(models, "ensure_default_model", ensure_model)
    ran = home.run("up", "--port", str(home.port))
    assert ran.code == 0
    assert ran.rows["done"] == "compiling; fetching the model"
    assert ran.rows["model"] == str(home.model)
    for said in ("compiling 2/2", "fetching the model"):
        assert said in ran.err
        assert said not in ran.out.replace(ran.rows["done"], "")
    as_json = home.run("up", "--port", str(home.port), "--json").result
    assert as_json["steps"] == ["compiling", "fetching the model"]


def test_nothing_that_up_started_keeps_the_callers_descriptors(home: Home) -> None:
    """`x=$(llamactl up --json)` returns, whatever else the shell had open."""
    words = (*COMMAND, "--json", *home.up_words())
    read_fd, write_fd = os.pipe()
    os.set_inheritable(write_fd, True)
    done = subprocess.run(words, capture_output=True, timeout=60, check=True, pass_fds=[write_fd])
    os.close(write_fd)
    assert done.stderr == b""
    readable, _, _ = select.select([read_fd], [], [], 10)
    assert readable, "somebody holds the other end"
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
    shell = f'x=$({" ".join(words)}); echo "$x"'
    again = subprocess.run(
        shell, shell=True, capture_output=True, text=True, timeout=60, check=True
    )
    assert '"outcome": "already_up"' in again.stdout


def test_a_port_in_use_is_refused_and_says_by_whom(home: Home) -> None:
    with socket.create_server(("127.0.0.1", home.port)):
        ran = home.run(*home.up_words())
        assert (ran.code, ran.out) == (5, "")
        assert f"127.0.0.1:{home.port} cannot be bound" in ran.err
        assert f"pid {os.getpid()} " in ran.err
        assert home.run("--json", *home.up_words()).error["code"] == "port_in_use"
    assert home.run(*home.up_words()).code == 0


def test_an_address_of_another_machine_is_a_usage_error(home: Home) -> None:
    ran = home.run(*home.up_words(), "--host", "192.0.2.1", "--json")
    assert ran.code == 2
    assert ran.error["message"] == "192.0.2.1 is no address of this machine"


def test_the_engine_may_listen_on_every_address(home: Home) -> None:
    assert home.run(*home.up_words(), "--host", "0.0.0.0").code == 0
    status = home.run("status", "--json").result
    assert status["desired"]["spec"]["host"] == "0.0.0.0"
    assert status["engine"]["url"] == f"http://127.0.0.1:{home.port}"


def test_an_engine_that_cannot_load_fails_with_its_last_words(home: Home) -> None:
    ran = home.run(*home.up_words("--fake-load-exit", "1"))
    assert (ran.code, ran.out) == (1, "")
    assert "exited with status 1" in ran.err
    assert "  | error: this model cannot be loaded" in ran.err
    status = home.run("status")
    assert status.code == 3
    assert status.rows["engine"].startswith("failed")
    assert "exited with status 1" in status.rows["last exit"]
    given_up = home.run("wait", "--ready", "--json")
    assert given_up.code == 1
    assert given_up.error["code"] == "engine_exited"


def test_a_load_that_takes_too_long_times_out_and_goes_on(home: Home) -> None:
    ran = home.run(*home.up_words()[:7], "--timeout", "0.2", "--", "--fake-never-ready")
    assert (ran.code, ran.out) == (6, "")
    assert "within 0.2 s" in ran.err
    assert "it goes on" in ran.err
    status = home.run("status")
    assert (status.code, status.rows["engine"].split(",")[0]) == (3, "starting")
    busy = home.run("reconfigure", "-c", "4k", "--json")
    assert (busy.code, busy.error["code"]) == (5, "operation_in_progress")


def test_an_interrupted_up_goes_on_without_the_command(home: Home) -> None:
    words = [*COMMAND, *home.up_words("--fake-never-ready")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as loading:
        assert loading.stderr is not None
        for line in loading.stderr:
            if line == b"the engine is starting\n":
                break
        loading.send_signal(signal.SIGINT)
        out, err = loading.communicate(timeout=20)
    assert (loading.returncode, out) == (130, b"")
    assert err.endswith(b"the daemon goes on with it; `llamactl status` shows how far it is\n"
                        b"llamactl: interrupted\n")  # fmt: skip
    assert home.run("status", "--json").result["state"] == "starting"


def test_down_ends_engine_and_daemon(home: Home) -> None:
    up = home.up()
    assert home.run("down").out == "engine stopped\n"
    assert not runs(up["pid"])
    assert not runs(up["daemon_pid"])
    assert home.run("status").code == 4
    assert home.run("down").out == "engine already stopped\n"


def test_an_engine_that_outlived_its_daemon_is_named_and_stopped(home: Home) -> None:
    up = home.up()
    daemon = psutil.Process(up["daemon_pid"])
    daemon.kill()
    daemon.wait(10)
    status = home.run("status", "--json")
    assert status.code == 4
    assert json.loads(status.err)["error"]["details"]["engine_pids"] == [up["pid"]]
    assert f"engine {up['pid']} outlived it" in home.run("status").err
    down = home.run("down")
    assert (down.code, down.out) == (0, "engine stopped\n")
    assert f"engine {up['pid']} still runs" in down.err
    assert not runs(up["pid"])


def test_up_after_a_lost_daemon_finds_the_same_engine(home: Home) -> None:
    up = home.up()
    daemon = psutil.Process(up["daemon_pid"])
    daemon.kill()
    daemon.wait(10)
    again = home.up()
    assert again["pid"] == up["pid"]
    assert again["daemon_started"] is True


def test_a_daemon_that_lives_and_does_not_answer_is_not_taken_for_none(home: Home) -> None:
    home.paths.runtime.mkdir(0o700)
    with home.paths.daemon_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remains.daemon_holds_lock(home.paths)
        assert home.run("down").code == 4
    assert not remains.daemon_holds_lock(home.paths)


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        '{"boot_id": "another boot", "engine_pid": 1, "engine_start_ticks": 0}',
        '{"boot_id": "%(boot)s", "engine_pid": null}',
        '{"boot_id": "%(boot)s", "engine_pid": %(pid)d, "engine_start_ticks": 1}',
    ],
)
def test_a_record_that_proves_no_engine_names_none(home: Home, record: str) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    directory = home.paths.engine_dir("0" * 32)
    directory.mkdir(parents=True)
    (directory / "holder.json").write_text(record % {"boot": boot, "pid": os.getpid()})
    assert remains.engine_pids(home.paths) == []


def test_serve_is_the_daemon_in_the_foreground(home: Home) -> None:
    words = [*COMMAND, "serve", "--no-resume"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as serving:
        try:
            home.await_daemon()
            up = home.up()
            assert up["daemon_pid"] == serving.pid
            assert up["daemon_started"] is False
            second = subprocess.run(words, capture_output=True, timeout=30, check=False)
            assert second.returncode == 5
            assert f"a daemon (pid {serving.pid}) already runs".encode() in second.stderr
            assert home.run("down").code == 0
        finally:
            serving.kill()
        out, _ = serving.communicate()
    assert (serving.returncode, out) == (0, b"")


def test_waiting_for_an_engine_that_comes_later(home: Home) -> None:
    words = [*COMMAND, "wait", "--ready", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as waiting:
        pid = home.up("--fake-load-s", "0.3")["pid"]
        out, _ = waiting.communicate(timeout=30)
    assert waiting.returncode == 0
    assert '"state": "ready"' in out
    assert home.run("wait", "--json").result["state"] == "ready"
    assert pid == home.run("status", "--json").result["engine"]["pid"]
