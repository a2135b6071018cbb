"""The user's keys and ours: together in one private file, or none at all."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import keys
from llamactl_supervisor.errors import LlamactlError

if TYPE_CHECKING:
    from pathlib import Path


def test_ours_stands_before_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"# of the team\nfirst\nsecond")
    path = keys.write(tmp_path, str(tmp_path / "mine"), {})
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    own, *users = path.read_bytes().split(b"\n")
    assert users == [b"# of the team", b"first", b"second"]
    assert len(own) > 40
    assert keys.ours(tmp_path) == own.decode()


@pytest.mark.parametrize("name", ["LLAMA_API_KEY", "LLAMA_ARG_API_KEY_FILE"])
def test_a_key_in_the_environment_is_joined_by_ours(tmp_path: Path, name: str) -> None:
    path = keys.write(tmp_path, None, {name: "theirs"})
    assert path is not None
    assert path.read_text() == f"{keys.ours(tmp_path)}\n"


def test_an_open_engine_stays_open(tmp_path: Path) -> None:
    assert keys.write(tmp_path, None, {"LLAMA_API_KEY": ""}) is None
    assert keys.ours(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no key"),
        (b"\n# none yet\n", "holds no key"),
        (b"k" * (keys.FILE_BYTES_MAX + 1), "has more than 1048576 bytes"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_without_a_key_opens_no_engine(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    mine = tmp_path / "mine"
    if content is not None:
        mine.write_bytes(content)
    with pytest.raises(LlamactlError) as caught:
        keys.write(tmp_path, str(mine), {})
    assert (caught.value.code, problem in caught.value.message) == ("invalid_request", True)
    assert not (tmp_path / keys.FILE_NAME).exists()


def test_a_pipe_in_place_of_the_file_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine")
    with pytest.raises(LlamactlError, match="holds no key"):
        keys.write(tmp_path, str(tmp_path / "mine"), {})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"secret\r", "carriage return"),
        (b"sec\0ret", "control character"),
        (b"sec\tret", "control character"),
        (b"secret\xff", "is not UTF-8"),
        (b" secret", "blanks around"),
        (b"secret ", "blanks around"),
        (b"   ", "blanks around"),
    ],
)
def test_a_line_that_no_client_could_send_is_named_and_not_shown(
    tmp_path: Path, line: bytes, problem: str
) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"# \tof the team\r\n\nfirst\n" + line + b"\n")
    with pytest.raises(LlamactlError) as caught:
        keys.write(tmp_path, str(mine), {})
    assert (caught.value.code, caught.value.details["line"]) == ("invalid_request", 4)
    assert "mine, line 4: " in caught.value.message
    assert problem in caught.value.message
    assert "sec" not in caught.value.message
    assert not (tmp_path / keys.FILE_NAME).exists()


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"secret\n")
    mine.chmod(mode)
    with pytest.raises(LlamactlError, match="can be written by others"):
        keys.write(tmp_path, str(mine), {})
    mine.chmod(0o644)
    assert keys.write(tmp_path, str(mine), {}) is not None
