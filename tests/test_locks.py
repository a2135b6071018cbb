"""One daemon for a runtime directory, and one for a state directory."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from cli_home import Home, fresh_home
from llamactl_supervisor import locks
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.paths import Paths
from sandbox import WITHIN_S, Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as fresh:
        yield fresh


def test_the_lock_is_held_once_and_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "daemon.lock"
    held = locks.lock(path, tmp_path)
    with pytest.raises(LlamactlError) as caught:
        locks.lock(path, tmp_path)
    assert caught.value.code == "daemon_running"
    assert caught.value.details == {"pid": str(os.getpid()), "runtime_dir": str(tmp_path)}
    os.close(held)
    os.close(locks.lock(path, tmp_path))


def test_only_a_living_daemon_of_another_runtime_directory_is_elsewhere(tmp_path: Path) -> None:
    ours = Paths(tmp_path, tmp_path, tmp_path / "r")
    theirs = replace(ours, runtime=tmp_path / "other")
    for paths in (ours, theirs):
        paths.create()
    assert locks.elsewhere(ours) is None
    with locks.held(theirs):
        assert locks.elsewhere(ours) == locks.Holder(str(os.getpid()), str(theirs.runtime))
        assert locks.elsewhere(theirs) is None
        match = f"runtime directory {theirs.runtime}$"
        with pytest.raises(LlamactlError, match=match), locks.held(ours):
            pass
    assert locks.elsewhere(ours) is None
    with locks.held(ours):
        pass


def test_a_second_daemon_with_the_same_state_is_refused_and_changes_nothing() -> None:
    box = Sandbox(stop_term_s=1)
    try:
        first = box.start()
        pid = box.up()
        before = box.paths.state_file.read_bytes()
        runtime = box.env["LLAMACTL_RUNTIME_DIR"]
        box.env["LLAMACTL_RUNTIME_DIR"] = str(box.root / "second")
        assert box.spawn().wait(WITHIN_S) == 5
        box.env["LLAMACTL_RUNTIME_DIR"] = runtime
        told = f"daemon_running: a daemon (pid {first.pid}) already runs for {box.paths.state}, "
        assert f"{told}with the runtime directory {runtime}" in box.daemon_log()
        assert box.paths.state_file.read_bytes() == before
        assert box.engine_pid() == pid
    finally:
        box.close()


def test_the_engine_of_a_daemon_elsewhere_is_never_called_an_orphan(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = home.up()
    owner = f"daemon pid {up['daemon_pid']} of {home.paths.runtime}"
    with monkeypatch.context() as there:
        there.setenv("LLAMACTL_RUNTIME_DIR", str(home.root / "second"))
        orphans = home.run("orphans")
        assert (orphans.code, orphans.err) == (0, "")
        assert orphans.out == f"no orphans\nthe engine of the saved state is owned by {owner}\n"
        told = home.run("orphans", "--json").result
        assert (told["orphans"], told["state_owned_by"]["pid"]) == ([], str(up["daemon_pid"]))
        status = home.run("status", "--json")
        assert status.code == 4
        assert json.loads(status.err)["error"]["details"]["state_owned_by"] == owner
        assert owner in home.run("status").err
        refused = home.run(*home.up_words(), "--json")
        assert (refused.code, refused.error["code"]) == (5, "daemon_running")
    assert home.run("status").code == 0
