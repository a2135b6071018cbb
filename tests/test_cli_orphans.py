"""What is left when a daemon is gone: shown by everything the same, ended only if it is proven."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest
from cli_home import Home, fresh_home
from llamactl_supervisor import locks, procfs, reap, remains
from llamactl_supervisor.paths import Paths
from sandbox import free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


def lose_daemon(home: Home) -> int:
    """Kill the daemon of a fake engine; return the engine's pid."""
    up = home.up()
    daemon = psutil.Process(up["daemon_pid"])
    daemon.kill()
    daemon.wait(10)
    return int(up["pid"])


def test_status_without_its_daemon_tells_what_is_left(home: Home) -> None:
    pid = lose_daemon(home)
    ran = home.run("status")
    assert ran.code == 4
    assert ran.rows["engine"].startswith(f"runs without a daemon, pid {pid}, up ")
    assert "`llamactl up` adopts it" in ran.err
    seen = json.loads(home.run("status", "--json").out)
    assert seen["daemon"] is None
    engine = seen["engines"][0]
    assert (engine["pid"], engine["model"]) == (pid, str(home.model))
    assert engine["memory"]["resident_bytes"] > 0


def test_an_engine_of_a_living_daemon_is_no_orphan(home: Home) -> None:
    home.up()
    assert home.run("orphans").out == "no orphans\n"
    assert home.run("orphans", "--end", "--json").result["orphans"] == []
    assert home.run("status").code == 0


def test_a_proven_orphan_is_named_and_ended(home: Home) -> None:
    pid = lose_daemon(home)
    ran = home.run("orphans")
    assert (ran.code, ran.err) == (1, "")
    assert ran.rows["engine"].startswith(f"pid {pid}, up ")
    assert "`llamactl up` takes it over" in ran.rows["do"]
    ended = home.run("orphans", "--end", "--json")
    assert ended.code == 0
    assert [(each["pid"], each["ended"]) for each in json.loads(ended.out)["orphans"]] == [
        (pid, True)
    ]
    assert not psutil.pid_exists(pid) or procfs.identify(pid) is None
    assert home.run("orphans").code == 0
    assert home.up()["pid"] != pid
    assert list(home.paths.crashes.iterdir()) == [], "it was ended by hand"


def test_an_orphan_that_ignores_term_is_killed(home: Home) -> None:
    up = home.up("--fake-ignore-term")
    daemon = psutil.Process(up["daemon_pid"])
    daemon.kill()
    daemon.wait(10)
    assert home.run("orphans", "--end").code == 0
    assert procfs.identify(up["pid"]) is None


@pytest.mark.parametrize("named", [True, False])
def test_what_cannot_be_proven_is_never_signalled(home: Home, *, named: bool) -> None:
    pid = lose_daemon(home)
    for record in home.paths.runtime.glob("engine-*/holder.json"):
        aside = record.rename(home.root / "holder.json")
    if not named:
        home.paths.state_file.unlink()
    ran = home.run("orphans", "--end", "--json")
    assert ran.code == 1
    [orphan] = json.loads(ran.out)["orphans"]
    assert (orphan["pid"], orphan["proven"], orphan["ended"]) == (pid, False, False)
    assert "record is gone" in orphan["doubt"]
    assert procfs.identify(pid) is not None
    assert f"kill {pid}" in home.run("orphans").rows["do"]
    aside.rename(record)
    assert home.run("orphans", "--end").code == 0
    assert procfs.identify(pid) is None


def test_an_engine_whose_every_record_is_lost_is_named_and_no_second_one_is_started(
    home: Home,
) -> None:
    """The state torn, its holder's record gone: its command line is all that tells of it."""
    pid = lose_daemon(home)
    home.paths.state_file.write_text("{ torn")
    [record] = home.paths.runtime.glob("engine-*/holder.json")
    record.unlink()
    elsewhere = [str(free_port()) if word == str(home.port) else word for word in home.up_words()]
    for _ in range(2):  # without a daemon, and beside one
        ran = home.run("orphans")
        assert (ran.code, pid_of(ran.out)) == (1, pid)
        assert f"kill {pid}" in ran.rows["do"]
        status = home.run("status")
        assert str(pid) in status.err + status.rows.get("stranger", "")
        doctor = json.loads(home.run("doctor", "--json").out)["findings"]
        [orphans] = [each["found"] for each in doctor if each["check"] == "orphans"]
        assert str(pid) in orphans
        for words in (home.up_words(), elsewhere):
            ran = home.run(*words, "--json")
            problem = json.loads(ran.err.splitlines()[-1])["error"]
            assert (ran.code, problem["code"]) == (5, "engine_unproven")
            assert problem["details"]["pid"] == pid
    assert (record.parent / "engine.sock").exists(), "it serves on, and can still be asked"
    assert home.run("down").code == 5
    assert procfs.identify(pid) is not None
    psutil.Process(pid).kill()
    until(lambda: procfs.identify(pid) is None)


def pid_of(out: str) -> int:
    return int(out.partition("pid ")[2].partition(",")[0])


def test_what_is_said_of_an_engine_is_the_same_everywhere(home: Home) -> None:
    """First proven by its record alone, then not at all."""
    pid = lose_daemon(home)
    home.paths.state_file.write_text("{ torn")
    assert "`llamactl up` takes it over" in home.run("orphans").rows["do"]
    assert f"engine {pid} outlived it: `llamactl up` adopts it" in home.run("status").err
    assert home.up()["pid"] == pid
    daemon = psutil.Process(home.run("status", "--json").result["daemon"]["pid"])
    daemon.kill()
    daemon.wait(10)
    shutil.rmtree(home.paths.runtime)
    assert f"kill {pid}" in home.run("orphans").rows["do"]
    assert "see `llamactl orphans`" in home.run("status").err
    for _ in range(2):
        ran = home.run("down", "--json")
        assert (ran.code, ran.error["code"], ran.error["details"]["pids"]) == (
            *(5, "engine_unproven", [pid]),
        )
        ran = home.run(*home.up_words(), "--json")
        assert (ran.code, json.loads(ran.err.splitlines()[-1])["error"]["code"]) == (
            *(5, "engine_unproven"),
        )
    psutil.Process(pid).kill()
    until(lambda: procfs.identify(pid) is None)


def test_what_a_daemon_of_another_runtime_directory_names_is_not_ours(tmp_path: Path) -> None:
    ours = Paths(tmp_path, tmp_path, tmp_path / "r")
    theirs = replace(ours, runtime=tmp_path / "other")
    for paths in (ours, theirs):
        paths.create()
    engine = procfs.identify(os.getpid())
    assert engine is not None
    named = {"instance_id": "x", "engine": engine.model_dump(), "holder": None}
    for state in ({"process": named}, {"process": None, "unproven": [named]}):
        ours.state_file.write_text(json.dumps(state))
        (found,) = remains.unrecorded(ours, set())
        assert (found.pid, found.instance_id) == (os.getpid(), "x")
        with locks.held(theirs):
            assert remains.unrecorded(ours, set()) == []


def test_nothing_is_adoptable_while_a_daemon_of_another_runtime_directory_has_the_state(
    home: Home,
) -> None:
    pid = lose_daemon(home)
    theirs = replace(home.paths, runtime=home.paths.runtime.with_name("other"))
    theirs.create()
    (free,) = remains.recorded(home.paths)
    assert (free.pid, free.adoptable) == (pid, True)
    with locks.held(theirs):
        (found,) = remains.recorded(home.paths)
        assert (found.pid, found.adoptable) == (pid, False)
        assert f"{theirs.runtime} has the state directory" in home.run("status").err


def test_a_record_that_others_could_have_written_proves_nothing(home: Home) -> None:
    pid = lose_daemon(home)
    home.paths.runtime.chmod(0o777)
    [orphan] = json.loads(home.run("orphans", "--end", "--json").out)["orphans"]
    assert (orphan["pid"], orphan["proven"]) == (pid, False)
    assert procfs.identify(pid) is not None
    home.paths.runtime.chmod(0o700)


def test_another_process_of_that_pid_is_not_ended(home: Home) -> None:
    """Its start differs: the pid was reused."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        real = procfs.identify(other.pid)
        assert real is not None
        earlier = real.model_copy(update={"start_ticks": real.start_ticks - 1})
        wrong = remains.Remnant(earlier, "engine", "x", adoptable=True, doubt=None)
        assert reap.end(home.paths, wrong, 0.1)
        assert other.poll() is None
        assert reap.end(home.paths, replace(wrong, process=real), 10)
        assert other.wait(10) == -signal.SIGTERM
