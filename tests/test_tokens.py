"""Token files: private or refused, and followed when they change."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor.api_settings import ApiSettings
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.tokens import Scope, TokenFile, Tokens

if TYPE_CHECKING:
    from pathlib import Path


def put(path: Path, text: str, mode: int = 0o600) -> Path:
    """Replace the file, as an editor does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    return new.replace(path)


def test_the_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = put(tmp_path / "t", "first\n")
    token = TokenFile(str(path))
    assert [token.matches(given) for given in (b"first", b"first\n", b"firs", b"")] == [
        *(True, False, False, False),
    ]
    put(path, "second")
    assert [token.matches(given) for given in (b"first", b"second")] == [False, True]
    path.chmod(0o640)
    assert [token.matches(given) for given in (b"second", b"")] == [False, False]
    path.unlink()
    assert not token.matches(b"second")
    put(path, "third")
    assert token.matches(b"third")
    said = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 2
    assert "is open to others: nobody is let in by it" in said[0]
    assert "third" not in caplog.text


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("", 0o600, "holds no token"),
        ("\n", 0o600, "holds no token"),
        ("two words", 0o600, "holds no token"),
        ("two\nlines", 0o600, "holds no token"),
        ("tökén", 0o600, "holds no token"),
        ("x" * 4097, 0o600, "holds no token"),
        ("s3cr3t", 0o604, "is open to others"),
        ("s3cr3t", 0o620, "is open to others"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, text: str, mode: int, problem: str) -> None:
    path = put(tmp_path / "t", text, mode)
    with pytest.raises(LlamactlError) as caught:
        TokenFile(str(path))
    assert (caught.value.code, problem in caught.value.message) == ("invalid_request", True)
    assert "s3cr3t" not in str(caught.value.hint)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, problem in (("none", "No such file"), ("pipe", "is no file"), ("", "directory")):
        with pytest.raises(LlamactlError, match=problem):
            TokenFile(str(tmp_path / name))


def test_two_tokens_have_two_scopes(tmp_path: Path) -> None:
    admin, read = put(tmp_path / "a", "all"), put(tmp_path / "r", "look")
    settings = ApiSettings(
        listen="127.0.0.1:9090",  # type: ignore[arg-type]  # it is parsed
        token_file=str(admin),
        read_token_file=str(read),
    )
    tokens = Tokens(settings)
    found = [tokens.scope(given) for given in (b"all", b"look", b"", b"other")]
    assert found == [Scope.ADMIN, Scope.READ, None, None]
