"""The engine's API keys: the user's, and beside them a private one of ours for our own requests.

Keys add up in llama-server, whether they come from a file or from its environment. So the file that
an engine is given holds ours first, then the user's: one that the user changes while the engine
runs, or that only the environment of an earlier daemon had, does not lock us out. Where the user
has no key there is none of ours either: it would close an open server.
"""

from __future__ import annotations

import os
import secrets
import stat
import unicodedata
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, error

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE_NAME = "api-keys"
FILE_BYTES_MAX = 2**20
ENVIRONMENT = ("LLAMA_API_KEY", "LLAMA_ARG_API_KEY_FILE")
"""Where llama-server itself looks for keys; the engine inherits them."""
_OURS_BYTES = 32


def write(directory: Path, user_file: str | None, env: Mapping[str, str]) -> Path | None:
    """Write the keys of the engine that `directory` belongs to, 0600; None: it is to have none.

    Raises `invalid_request` when the user's file cannot be read or holds no key: an engine without
    one would answer everybody. Raises OSError when the keys cannot be written.
    """
    users = b"" if user_file is None else read(user_file)
    if user_file is None and not any(env.get(name) for name in ENVIRONMENT):
        return None
    path = directory / FILE_NAME
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(secrets.token_urlsafe(_OURS_BYTES).encode() + b"\n" + users)
    return path


def ours(directory: Path) -> str | None:
    """Return our key to the engine that `directory` belongs to; None where it asks for none."""
    try:
        with (directory / FILE_NAME).open(encoding="ascii", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return None


def read(user_file: str) -> bytes:
    """Return the user's keys; raises `invalid_request` where there is none to read."""
    try:
        # Not blocking: what was a file when it was asked for may be a pipe now.
        fd = os.open(user_file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            users = file.read(FILE_BYTES_MAX + 1) or b""
    except OSError as exc:
        what = f"cannot be read: {exc.strerror or exc}"
        raise error(Code.INVALID_REQUEST, f"the API key file {user_file} {what}") from exc
    _no_other_writer(user_file, found)
    if len(users) > FILE_BYTES_MAX:
        what = f"has more than {FILE_BYTES_MAX} bytes"
        raise error(Code.INVALID_REQUEST, f"the API key file {user_file} {what}")
    for number, line in enumerate(users.split(b"\n"), 1):
        if (wrong := _unusable(line)) is not None:
            raise error(
                Code.INVALID_REQUEST,
                f"the API key file {user_file}, line {number}: {wrong}",
                hint="one key to a line, in UTF-8; the engine takes the line as it is",
                details={"file": user_file, "line": number},
            )
    if not any(line and not line.startswith(b"#") for line in users.split(b"\n")):
        raise error(
            Code.INVALID_REQUEST,
            f"the API key file {user_file} holds no key",
            hint="one key to a line; without --api-key-file the engine answers everybody",
        )
    return users


def _no_other_writer(user_file: str, found: os.stat_result) -> None:
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise error(
            Code.INVALID_REQUEST,
            f"the API key file {user_file} can be written by others: they could let themselves in",
            hint=f"chmod go-w {user_file}",
        )


def _unusable(line: bytes) -> str | None:
    """Return what is wrong with a line of the file, without repeating it; None: nothing."""
    if line.startswith(b"#"):
        return None
    try:
        key = line.decode()
    except UnicodeDecodeError:
        return "is not UTF-8"
    if key.endswith("\r"):
        return "ends with a carriage return, which would be part of the key"
    if any(unicodedata.category(character) == "Cc" for character in key):
        return "has a control character"
    if key != key.strip():
        return "has blanks around the key, which would be part of it"
    return None
