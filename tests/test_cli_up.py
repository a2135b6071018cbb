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
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from cli_home import COMMAND, Home, fresh_home, serving
from llamactl_builder import build as builder
from llamactl_builder import models
from llamactl_builder.progress import Progress, ProgressCallback
from llamactl_supervisor import locks, remains
from sandbox import FAKE_ENGINE, until

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
    assert "llamactl apply" in asked["hint"]
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
        "kv_unified is absent, asked for true",
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
    again = home.run("up", "--port", str(home.port), "--json").result
    assert again["steps"] == [], "it is up: there is nothing to build for it"
    as_json = home.run("up", "--port", str(home.port), "--fresh", "--json").result
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
    ran = home.run(*home.up_words(), "--timeout", "0.2", "--", "--fake-never-ready")
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
    assert home.run("down").out.splitlines()[0] == "engine stopped"
    assert not runs(up["pid"])
    assert not runs(up["daemon_pid"])
    assert home.run("status").code == 4
    assert home.run("down").out == "engine already stopped\n"


@pytest.mark.parametrize(("again", "head"), [("up", "carried"), ("start", "conversations:")])
def test_each_conversation_that_comes_back_to_another_place_is_named(
    home: Home, again: str, head: str
) -> None:
    home.run(*home.up_words(), "-np", "4")
    held = {"tokens": {"0": 50, "3": 44}}
    httpx.post(f"http://127.0.0.1:{home.port}/fake", json=held).raise_for_status()
    home.run("stop")
    assert home.run("apply", "-np", "1").code == 0
    ran = home.run(again)
    assert ran.code == 0
    lines = ran.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(head))
    assert "2 brought back (94 tokens, " in lines[at]
    assert lines[at + 1].strip() == "slot 3 -> page carried-1 (44 tokens)"
    assert home.run("pages", "ls", "--json").result["pages"][0]["name"] == "carried-1"


def test_an_engine_that_outlived_its_daemon_is_named_and_stopped(home: Home) -> None:
    up = home.up()
    daemon = psutil.Process(up["daemon_pid"])
    daemon.kill()
    daemon.wait(10)
    status = home.run("status", "--json")
    assert status.code == 4
    assert json.loads(status.err)["error"]["details"]["engine_pids"] == [up["pid"]]
    for words in (("status",), ("stop",), ("restart",), ("slots",), ("reconfigure", "-c", "64k")):
        said = f"engine {up['pid']} outlived it: `llamactl up` adopts it, `down` stops it"
        ran = home.run(*words)
        assert (ran.code, said in ran.err) == (4, True), words
    waited = home.run("wait", "--ready", "--timeout", "0.1")
    assert f"no daemon runs; engine {up['pid']} outlived it" in waited.err
    down = home.run("down")
    assert (down.code, down.out.splitlines()[0]) == (0, "engine stopped")
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


def kill_all(up: Any) -> None:
    """End daemon and engine as a machine does that loses its power."""
    for pid in (up["daemon_pid"], up["pid"]):
        process = psutil.Process(pid)
        process.kill()
        process.wait(10)


def test_up_without_flags_goes_on_with_the_engine_that_was_last_asked_for(home: Home) -> None:
    up = home.run(*home.up_words(), "-c", "24k", "-np", "3", "--json").result
    again = home.run("up", "--json").result
    assert (again["outcome"], again["pid"], again["resumed"]) == ("already_up", up["pid"], True)
    daemon = psutil.Process(up["daemon_pid"])
    daemon.kill()
    daemon.wait(10)
    adopted = home.run("up", "--json").result
    assert (adopted["outcome"], adopted["pid"]) == ("already_up", up["pid"])
    kill_all(adopted)
    ran = home.run("up")
    assert ran.code == 0
    assert ran.rows["url"] == f"http://127.0.0.1:{home.port}"
    assert ran.rows["context"] == "24576 tokens: 3 slots of 8192"
    told = f"as last asked for: {home.model}, 24576 tokens over 3 slots, port {home.port} of"
    assert told in ran.err


def test_what_no_flag_of_up_says_is_no_wish_against_what_was_asked_for(home: Home) -> None:
    pid = home.run(*home.up_words(), "-c", "24k", "-np", "3", "--json").result["pid"]
    same = home.run(*home.up_words(), "--json").result
    assert (same["outcome"], same["pid"]) == ("already_up", pid)
    one = home.run("up", "--per-slot", "4k", "--json").error
    assert (one["code"], "n_ctx is 24576, asked for 12288" in one["message"]) == ("conflict", True)
    assert "n_seq" not in one["message"]
    assert home.run("reconfigure", "-c", "12k").code == 0
    home.run("stop")
    after = home.run("up", "-np", "2", "--json").result
    assert (after["geometry"]["n_ctx"], after["geometry"]["n_seq"]) == (12288, 2)
    assert after["url"] == f"http://127.0.0.1:{home.port}"
    home.run("stop")
    fresh = home.run(*home.up_words(), "--fresh", "--json").result
    assert (fresh["geometry"]["n_ctx"], fresh["resumed"]) == (16384, False)


def test_up_of_an_engine_that_is_not_up_takes_what_the_file_says_since(home: Home) -> None:
    file = home.root / "config" / "llamactl" / "config.toml"
    home.run(*home.up_words(), "-np", "3")
    home.run("stop")
    file.parent.mkdir(parents=True)
    file.write_text("[engine]\nn_ctx = '48k'\n")
    file.chmod(0o600)
    up = home.run("up", "--json").result
    assert (up["geometry"]["n_ctx"], up["geometry"]["n_seq"]) == (49152, 3)


def test_up_builds_again_what_is_gone_of_what_it_had_built(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, fetched = home.paths.cache / "engine", home.paths.cache / "model.gguf"

    def ensure_engine(**_: object) -> builder.EngineBuild:
        built.parent.mkdir(mode=0o700, exist_ok=True)
        built.unlink(missing_ok=True)
        built.symlink_to(FAKE_ENGINE)
        return builder.EngineBuild(built, "key", False, 1.0, True)

    def ensure_model(**_: object) -> Path:
        fetched.write_bytes(home.model.read_bytes())
        return fetched

    monkeypatch.setattr(builder, "ensure_engine", ensure_engine)
    monkeypatch.setattr(models, "ensure_default_model", ensure_model)
    assert home.run("up", "--port", str(home.port), "-np", "3").code == 0
    home.run("stop")
    built.unlink()
    fetched.unlink()
    again = home.run("up", "--json").result
    assert (again["geometry"]["n_seq"], again["engine_path"]) == (3, str(built))


def test_a_daemon_that_lives_and_does_not_answer_is_not_taken_for_none(home: Home) -> None:
    home.paths.runtime.mkdir(0o700)
    with home.paths.daemon_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert locks.daemon_lives(home.paths)
        assert home.run("down").code == 4
    assert not locks.daemon_lives(home.paths)


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
    with serving("--no-resume") as daemon:
        home.await_daemon()
        up = home.up()
        assert up["daemon_pid"] == daemon.pid
        assert up["daemon_started"] is False
        with serving("--no-resume") as second:
            _, said = second.communicate(timeout=30)
        assert second.returncode == 5
        assert f"a daemon (pid {daemon.pid}) already runs" in said
        assert home.run("down").code == 0
        out, _ = daemon.communicate()
    assert (daemon.returncode, out) == (0, "")


def test_waiting_for_an_engine_that_comes_later(home: Home) -> None:
    words = [*COMMAND, "wait", "--ready", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as waiting:
        pid = home.up("--fake-load-s", "0.3")["pid"]
        out, _ = waiting.communicate(timeout=30)
    assert waiting.returncode == 0
    assert '"state": "ready"' in out
    assert home.run("wait", "--json").result["state"] == "ready"
    assert pid == home.run("status", "--json").result["engine"]["pid"]


def ready_pid(home: Home) -> int | None:
    """Return the pid of the engine, where it is ready."""
    ran = home.run("status", "--json")
    return None if ran.code else int(ran.result["engine"]["pid"])


def test_idle_is_not_the_time_between_a_crash_and_the_next_engine(home: Home) -> None:
    pid = home.up("--fake-load-s", "0.5")["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: ready_pid(home) != pid)  # the daemon may not have noticed yet
    assert home.run("wait", "--json", "--timeout", "30").result["state"] == "ready"
    assert home.run("status", "--json").result["engine"]["pid"] != pid
