"""What `llamactl validate` leaves of the machine to others, and what it does not leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from cli_home import COMMAND, Home, fresh_home
from live_engine import live_engine
from llamactl_supervisor.errors import InvalidRequestError
from llamactl_validate import attach, lowly, preflight, suites
from llamactl_validate.scenario import Scenario, Trial
from llamactl_validate.workplace import LOCK, PREFIX, SETTLED_S, Workplace, sweep
from sandbox import FAKE_ENGINE, WITHIN_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiny_models import TinyModels

STARTER = """
import os, subprocess, sys, time
child = subprocess.Popen([*sys.argv[1:3], "-m", sys.argv[3], str(os.getpid()), *sys.argv[4:]])
print(child.pid, flush=True)
time.sleep(600)
"""
"""Starts a lowly program, says its pid, and goes when it is killed."""
DAEMON = """
import json, sys, time
from pathlib import Path
from llamactl_validate.daemon import Daemon
daemon = Daemon(Path(sys.argv[1]), Path(sys.argv[2]), patience_s=float(sys.argv[3]))
if sys.argv[4:]:
    daemon.kill()
print(json.dumps([str(daemon.place.path), *(each.pid for each in daemon.processes())]), flush=True)
time.sleep(600)
"""
"""Has a daemon and its engine, or an engine that has outlived it; goes when it is killed."""
SLEEP = "import sys, time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


# What runs


@pytest.mark.parametrize("flag", [lowly.IDLE, lowly.EQUAL])
def test_an_engine_stands_in_nobodys_way_and_goes_with_its_starter(flag: str) -> None:
    words = [sys.executable, "-P", lowly.__name__, flag, sys.executable, "-c", SLEEP]
    with subprocess.Popen([sys.executable, "-c", STARTER, *words], stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        child = psutil.Process(int(one.stdout.readline()))
        assert one.stdout.readline() == b"up\n"
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n"
        idle = flag == lowly.IDLE
        assert child.nice() == (19 if idle else os.nice(0))
        assert os.sched_getscheduler(child.pid) == (os.SCHED_BATCH if idle else os.SCHED_OTHER)
        if idle:
            assert child.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
        one.send_signal(signal.SIGKILL)
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


@contextlib.contextmanager
def drilled(home: Home, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], Path, list[int]]]:
    """Yield a process that has a daemon of its own, its place, and the pids of all that it has."""
    words = (sys.executable, "-c", DAEMON, str(FAKE_ENGINE), str(home.model), str(WITHIN_S), *words)
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            place, *pids = json.loads(process.stdout.readline())
            yield process, Path(place), pids
        finally:
            process.kill()


def is_gone(pid: int) -> bool:
    """Whether it has ended; nobody may have waited for it so far."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_a_daemon_of_a_drill_is_private_and_stands_in_nobodys_way(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user's own daemon and engine are told is for them alone."""
    for name in ("LLAMACTL_N_CTX", "LLAMACTL_LOG_FILES_MAX", "LLAMA_ARG_THREADS", "NOTIFY_SOCKET"):
        monkeypatch.setenv(name, "7")
    with drilled(home) as (_, place, (warden, *others)):
        assert len(others) == 3
        assert psutil.Process(warden).nice() == os.nice(0)
        for pid in others:
            process = psutil.Process(pid)
            assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
            assert process.nice() == 19
            assert process.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
            env = process.environ()
            assert not {"LLAMACTL_N_CTX", "LLAMA_ARG_THREADS", "NOTIFY_SOCKET"} & env.keys()
            ours = {name: env[name] for name in env if name.startswith("LLAMACTL_")}
            assert all(Path(value).is_relative_to(place) for value in ours.values()), ours
            assert len(ours) == 4
        (keys,) = place.glob("keys")
        assert keys.stat().st_mode & 0o777 == 0o600
        assert keys.read_text().strip() not in " ".join(psutil.Process(others[-1]).cmdline())
    assert not home.paths.runtime.exists()
    assert not home.paths.state.exists()


@pytest.mark.parametrize("outlived", [(), ("outlived",)])
def test_a_daemon_of_a_drill_and_its_engine_go_with_whoever_has_them(
    home: Home, outlived: tuple[str, ...]
) -> None:
    """Killed as nothing can be caught; the daemon is there, or the engine has outlived it."""
    with drilled(home, *outlived) as (process, place, pids):
        assert len(pids) == 4 - len(outlived)
        process.kill()
        until(lambda: all(map(is_gone, pids)))
    age(place)
    assert place in sweep(place.parent)


def test_an_engine_that_outlived_its_warden_ends_with_its_place(home: Home) -> None:
    with drilled(home) as (process, place, (warden, *others)):
        os.kill(warden, signal.SIGKILL)
        until(lambda: is_gone(others[0]))
        assert not is_gone(others[-1]), "no daemon of ours: the engine is meant to outlive one"
        process.kill()
    age(place)
    assert place in sweep(place.parent)
    assert all(map(is_gone, others))


def test_what_a_model_takes_too_little_for_is_skipped_and_proves_nothing(
    home: Home, engine_path: Path, tiny: TinyModels
) -> None:
    """The tiny model takes 256 tokens in a slot; a change that makes no sense wants none."""
    words = ("validate", "--engine", str(engine_path), "--model", str(tiny.model("llama-dense")))
    why = "the model takes 256 tokens in a slot, not 500"
    some = home.run(*words, "-s", "refusals.nonsense", "-s", "pages.parked", "--json")
    said = json.loads(some.out)
    found = [(row["verdict"], row["why"]) for row in said["scenarios"]]
    assert (some.code, found) == (0, [("skipped", why), ("passed", None)])
    none = home.run(*words, "-s", "pages.parked", "-s", "supervision.restart")
    assert none.code == 2
    assert f"skipped: nothing was shown ({why}), 0 failed, 2 skipped in " in none.out


# What is left


def age(path: Path) -> None:
    """Have a directory be there for long."""
    then = path.stat().st_mtime - 2 * SETTLED_S
    os.utime(path, (then, then))


def test_what_a_killed_run_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    left, young, foreign = (tmp_path / name for name in (f"{PREFIX}a", f"{PREFIX}b", "other"))
    for each in (left, young, foreign):
        each.mkdir()
        (each / "log").write_text("")
    age(left)
    age(foreign)
    (tmp_path / f"{PREFIX}link").symlink_to(foreign)
    assert sweep(tmp_path) == [left]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{PREFIX}b",
        f"{PREFIX}link",
        "other",
    ]


@pytest.mark.parametrize("command", ["validate", "bench"])
def test_what_was_left_is_swept_before_it_leaves_no_room(
    home: Home, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The fake engine has a device with one byte left: nothing is run."""
    place = home.root / "t"
    left = place / f"{PREFIX}a"
    left.mkdir(parents=True)
    age(left)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    ran = home.run(command, "--engine", str(FAKE_ENGINE), "--model", str(home.model))
    assert ran.code == 2
    assert f"removed {left}, which a killed run left behind" in ran.err
    assert [*place.iterdir()] == []


def test_what_is_in_use_is_not_swept() -> None:
    place = Workplace()
    try:
        age(place.path)
        assert place.path not in sweep(place.path.parent)
        assert (place.path / LOCK).exists()
        assert place.path.stat().st_mode & 0o777 == 0o700
    finally:
        place.close()
    assert not place.path.exists()


# An engine that runs already


def test_what_runs_is_looked_at_and_not_changed(
    home: Home, engine_path: Path, model_path: Path
) -> None:
    with live_engine(engine_path, model_path) as live:
        before = live.props(), live.slots()
        by_url = home.run("validate", "--attach", f"http://127.0.0.1:{live.port}", "--json")
        by_socket = home.run("validate", "--attach", str(live.socket))
        assert (live.props(), live.slots()) == before
    assert by_url.code == by_socket.code == 0, by_socket
    said = json.loads(by_url.out)
    assert [row["verdict"] for row in said["scenarios"]] == ["passed"] * 4
    assert "POST /reconfigure with dry_run" in by_socket.err


def test_one_that_sleeps_sleeps_on(home: Home, engine_path: Path, model_path: Path) -> None:
    with live_engine(engine_path, model_path, "--sleep-idle-seconds", "1") as live:
        until(lambda: live.props()["is_sleeping"])
        ran = home.run("validate", "--attach", str(live.socket), "--json")
        props = live.props()
        assert (props["is_sleeping"], props["n_weight_loads"]) == (True, 1)
    assert ran.code == 0
    verdicts = {row["scenario"]: row["verdict"] for row in json.loads(ran.out)["scenarios"]}
    assert verdicts == {
        "attach.serves": "passed",
        **dict.fromkeys(("attach.slots", "attach.pages", "attach.dry-run"), "skipped"),
    }


@pytest.mark.parametrize("where", ["http://127.0.0.1:{port}", "nonsense", "http://[", "ftp://x"])
def test_where_nobody_answers_nothing_is_shown(home: Home, where: str) -> None:
    ran = home.run("validate", "--attach", where.format(port=home.port), "--json")
    assert (ran.code, ran.error["code"]) == (2, "no_engine")


def test_a_port_that_leaves_a_handshake_unanswered_is_soon_left(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers with something else once the client has gone, or after long."""
    monkeypatch.setattr(attach, "CONNECT_S", 0.2)

    def serve(server: socket.socket) -> None:
        client, _ = server.accept()
        with client:
            client.settimeout(WITHIN_S)
            with contextlib.suppress(OSError):
                while client.recv(65536):
                    pass
            with contextlib.suppress(OSError):
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, server)
        where = f"https://127.0.0.1:{server.getsockname()[1]}"
        ran = home.run("validate", "--attach", where, "--json")
        serving.result()
    assert (ran.code, ran.error["code"]) == (2, "no_engine")
    assert "timed out" in ran.error["message"]


def test_a_report_that_cannot_be_written_is_told_before_anything_runs(home: Home) -> None:
    for file in (home.root, home.root / "none" / "report.xml"):
        ran = home.run(*validate(home, "--junit", str(file), "--yes"))
        assert ran.code == 2
        assert "cannot be written" in ran.err


# What is asked of the command


def validate(home: Home, *words: str) -> tuple[str, ...]:
    return ("validate", "--engine", str(FAKE_ENGINE), "--model", str(home.model), *words)


def test_what_does_not_fit_is_not_run_and_both_numbers_are_said(home: Home) -> None:
    """The fake engine has a device with one byte left."""
    ran = home.run(*validate(home, "--json"))
    assert (ran.code, ran.error["code"]) == (2, "does_not_fit")
    details = ran.error["details"]
    assert details["what"] == "memory of GPU"
    assert details["bytes_needed"] > details["bytes_available"] == 1
    assert "not run: " in ran.error["message"]


def test_a_disk_without_room_is_told_how_another_one_is_taken(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage("/")._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    *_, disk = preflight.needs(FAKE_ENGINE, home.model, preflight.LARGEST, preflight.BESIDE)
    with pytest.raises(InvalidRequestError) as refused:
        preflight.refuse([disk])
    assert f"make room in {tempfile.gettempdir()}, have TMPDIR name " in str(refused.value.hint)


def test_a_temporary_directory_without_room_for_a_socket_is_told_first(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = home.root / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    ran = home.run(*validate(home, "--yes", "--json"))
    assert (ran.code, ran.error["code"]) == (2, "path_too_long")
    assert "TMPDIR" in ran.error["hint"]
    assert list(deep.iterdir()) == []


def test_a_model_that_no_engine_loads_is_not_run(home: Home, engine_path: Path) -> None:
    home.model.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    ran = home.run("validate", "--engine", str(engine_path), "--model", str(home.model), "--json")
    assert (ran.code, ran.error["code"]) == (2, "engine_spawn_failed")
    assert ran.error["message"].startswith("not run: the engine would not load this: ")


def test_an_engine_that_does_not_start_fails_in_its_own_words(home: Home) -> None:
    junit = home.root / "report.xml"
    ran = home.run(*validate(home, "--suite", "cycles", "--yes", "--junit", str(junit), "--json"))
    said = json.loads(ran.out)
    assert (ran.code, said["verdict"]) == (1, "failed")
    (row,) = said["scenarios"]
    assert row["why"].startswith("an engine starts: the engine ended with status 2: ")
    assert "unrecognized arguments" in row["why"]
    assert 'failures="1"' in junit.read_text()
    needs = {need["what"]: need for need in said["planned"]["needs"]}
    assert needs.keys() == {"memory", "memory of GPU", "disk"}
    assert needs["memory of GPU"]["bytes_needed"] > needs["memory of GPU"]["bytes_available"]
    assert said["planned"]["seconds"] > 0


def test_on_a_terminal_a_failure_is_said_at_once_above_the_bar(home: Home) -> None:
    words = [*COMMAND, *validate(home, "--suite", "cycles", "--yes")]
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "NO_COLOR": "1"}
    seen = b""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs, env=env) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # how a terminal ends
            while part := os.read(ours, 65536):
                seen += part
        os.close(ours)
        assert process.stdout is not None
        table = process.stdout.read()
    assert process.returncode == 1
    assert b"failed  " in table
    (line,) = [each for each in seen.split(b"\n") if b"failed: cycles.parked-and-moved (" in each]
    assert b"unrecognized arguments" in line


def test_an_interrupt_leaves_the_report_of_what_had_ended(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes(trial: Trial) -> None:
        trial.measure("answers", 3)

    def interrupted(trial: Trial) -> None:
        trial.now("the second step")
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: False)

    three = [
        Scenario(name, "some", "it holds", run, (1, 1), (0, 0))
        for name, run in (("first", passes), ("second", interrupted), ("third", passes))
    ]
    monkeypatch.setattr(suites, "scenarios", lambda: three)
    junit = home.root / "report.xml"
    ran = home.run(*validate(home, "--yes", "--junit", str(junit), "--json"))
    assert (ran.code, json.loads(ran.err)["error"]["code"]) == (130, "interrupted")
    said = json.loads(ran.out)
    assert said["verdict"] == "interrupted"
    found = [(row["verdict"], row["why"]) for row in said["scenarios"]]
    cut = ("interrupted", "the second step")
    assert found == [("passed", None), cut, ("interrupted", None)]
    assert 'tests="3"' in junit.read_text()
    shown = home.run(*validate(home, "--yes"))
    assert shown.code == 130
    assert "interrupted: 1 passed, 0 failed, 2 interrupted in " in shown.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_command_alone_ends_it_at_once_and_leaves_a_report(
    home: Home, engine_path: Path, model_path: Path, number: signal.Signals
) -> None:
    """Its engine has not heard the signal, and is in the middle of long answers."""
    junit, place = home.root / "report.xml", home.root / "t"
    place.mkdir()
    words = [*COMMAND, "validate", "--engine", str(engine_path), "--model", str(model_path)]
    words += ["-s", "identity.greedy", "-s", "pages.parked", "--junit", str(junit), "--json"]
    env, pipe = os.environ | {"TMPDIR": str(place)}, subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, env=env) as process:
        until(lambda: [*place.glob(f"{PREFIX}*/engine.sock")])
        process.send_signal(number)
        process.send_signal(number)
        out, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + number, err
    assert json.loads(err)["error"]["code"] == "interrupted"
    assert json.loads(out)["verdict"] == "interrupted"
    assert 'tests="2" failures="0" errors="1" skipped="1"' in junit.read_text()
    assert json.loads(out)["scenarios"][0]["took_s"] > 0
    assert [*place.glob(f"{PREFIX}*")] == []


def test_the_scenarios_are_listed_without_an_engine(home: Home) -> None:
    every = home.run("validate", "--list", "--json").result["scenarios"]
    names = [each["scenario"] for each in every]
    assert len(names) == len(set(names)) >= 30
    two = home.run("validate", "--list", "--json", "-s", "pages", "-s", "cycles").result
    chosen = {each["scenario"].split(".")[0] for each in two["scenarios"]}
    assert chosen == {"pages", "cycles"}
    mixed = home.run("validate", "--list", "--json", "-s", "identity.greedy", "-s", "cycles").result
    listed = [each["scenario"] for each in mixed["scenarios"]]
    assert listed == ["identity.greedy", "cycles.parked-and-moved"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--suite", "sweets"), "there is no suite or scenario 'sweets'; there are identity,"),
        (("--engine", "/nowhere/llama-server"), "/nowhere/llama-server is not a program"),
        (("--model", "/nowhere/a.gguf"), "/nowhere/a.gguf"),
        (("--junit", "/nowhere/report.xml"), "/nowhere/report.xml cannot be written"),
        (("--quick", "--full"), "--quick with --full: give one of the two"),
        (("--api-key-file", "key"), "--api-key-file: has no use without --attach"),
        (
            (*("--attach", "http://[", "-s", "durability", "-m", "X", "--engine", "Y"), "--full"),
            "--suite, --model, --engine, --full: has no use with --attach",
        ),
        (("--attach", "http://[", "--quick", "--yes"), "--quick, --yes: has no use with --attach"),
        (("--attach", "http://[", "--list"), "--list: has no use with --attach"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_starts(
    home: Home, words: tuple[str, ...], said: str
) -> None:
    ran = home.run("validate", *words)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
