"""Where things live, and that they are nobody else's."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.paths import Paths


def test_each_directory_can_be_chosen() -> None:
    env = {f"LLAMACTL_{name}_DIR": f"/{name}" for name in ("CACHE", "STATE", "RUNTIME")}
    paths = Paths.from_env(env)
    assert paths == Paths(Path("/CACHE"), Path("/STATE"), Path("/RUNTIME"))


def test_the_runtime_directory_follows_the_session() -> None:
    assert Paths.from_env({"XDG_RUNTIME_DIR": "/run/user/7"}).runtime == Path(
        "/run/user/7/llamactl"
    )
    assert Paths.from_env({}).runtime.is_absolute()


def test_a_socket_path_that_cannot_be_bound_is_an_error_at_once() -> None:
    with pytest.raises(LlamactlError) as caught:
        Paths.from_env({"LLAMACTL_RUNTIME_DIR": "/" + "r" * 80})
    assert caught.value.code == "path_too_long"
    assert "engine.sock" in caught.value.message


def test_directories_are_created_private_and_narrowed(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "c", tmp_path / "s", tmp_path / "r")
    paths.runtime.mkdir()
    paths.runtime.chmod(0o777)
    paths.create()
    for directory in (paths.cache, paths.state, paths.runtime, paths.logs, paths.pages):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(LlamactlError) as caught:
        Paths(tmp_path / "c", tmp_path / "s", tmp_path / "r").create()
    assert caught.value.code == "insecure_directory"


def test_a_directory_that_holds_something_is_not_narrowed(tmp_path: Path) -> None:
    shared = tmp_path / "r"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "somebody's").touch()
    with pytest.raises(LlamactlError) as caught:
        Paths(tmp_path / "c", tmp_path / "s", shared).create()
    assert caught.value.code == "insecure_directory"
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777


def test_what_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LlamactlError) as caught:
        Paths(tmp_path / "c", tmp_path / "s", tmp_path / "file").create()
    assert caught.value.code == "state_unwritable"
    assert str(tmp_path / "file") in caught.value.message
