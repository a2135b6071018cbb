"""Token files: private or refused, and followed when they change."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor.api_settings import ApiSettings
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.tokens import Scope, TokenFile, Tokens, read

if TYPE_CHECKING:
    from pathlib import Path

ALL, LOOK = "token-for-everything", "token-for-looking"


def put(path: Path, text: str, mode: int = 0o600) -> Path:
    """Replace the file, as an editor does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    return new.replace(path)


def test_the_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = put(tmp_path / "t", "first-token-of-ours\n")
    token = TokenFile(str(path))
    first, second = b"first-token-of-ours", b"second-token-of-ours"
    matched = [token.matches(given) for given in (first, first + b"\n", b"first", b"")]
    assert matched == [True, False, False, False]
    put(path, "second-token-of-ours")
    assert [token.matches(given) for given in (first, second)] == [False, True]
    path.chmod(0o640)
    assert [token.matches(given) for given in (second, b"")] == [False, False]
    path.unlink()
    assert not token.matches(second)
    put(path, "third-token-of-ours")
    assert token.matches(b"third-token-of-ours")
    said = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 2
    assert "is open to others: nobody is let in by it" in said[0]
    assert "third-token-of-ours" not in caplog.text


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("", 0o600, "is empty"),
        (" \t\n", 0o600, "is empty"),
        ("s3cr3t of two words", 0o600, "holds no token"),
        ("s3cr3t-of-two\nlines", 0o600, "holds no token"),
        ("s3cr3t-tökén-of-a-test", 0o600, "holds no token"),
        ("s3cr3t-\x07-of-a-test", 0o600, "holds no token"),
        ("x", 0o600, "less than 16 characters"),
        ("s3cr3t", 0o600, "less than 16 characters"),
        ("s3cr3t-of-a-bad", 0o600, "less than 16 characters"),
        ("passwordpassword", 0o600, "less than 8 different characters"),
        ("0" * 64, 0o600, "less than 8 different characters"),
        ("s3cr3t-of-a-test" * 257, 0o600, "has more than 4096 bytes"),
        ("s3cr3t-of-a-test", 0o604, "is open to others"),
        ("s3cr3t-of-a-test", 0o620, "is open to others"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, text: str, mode: int, problem: str) -> None:
    path = put(tmp_path / "t", text, mode)
    with pytest.raises(LlamactlError) as caught:
        read(str(path))
    assert not TokenFile(str(path)).matches(text.strip().encode())
    assert (caught.value.code, problem in caught.value.message) == ("invalid_request", True)
    assert "s3cr3t" not in f"{caught.value.message}{caught.value.hint}"
    assert "openssl rand -hex 32" in str(caught.value.hint) or mode != 0o600
    assert read(str(put(path, "s3cr3t-of-a-test"))) == b"s3cr3t-of-a-test"


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, problem in (("none", "No such file"), ("pipe", "is no file"), ("", "directory")):
        with pytest.raises(LlamactlError, match=problem):
            read(str(tmp_path / name))


def test_two_tokens_have_two_scopes(tmp_path: Path) -> None:
    admin, read = (
        put(tmp_path / "a", ALL),
        put(tmp_path / "r", LOOK),
    )
    settings = ApiSettings(
        listen="127.0.0.1:9090",  # type: ignore[arg-type]  # it is parsed
        token_file=str(admin),
        read_token_file=str(read),
    )
    tokens = Tokens(settings)
    found = [tokens.scope(given) for given in (ALL.encode(), LOOK.encode(), b"", b"other")]
    assert found == [Scope.ADMIN, Scope.READ, None, None]
