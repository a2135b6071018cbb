"""Bearer tokens in files that only their owner can read, read again whenever they change."""

from __future__ import annotations

import hmac
import logging
import os
import shlex
import stat
from enum import Enum
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, LlamactlError, error

if TYPE_CHECKING:
    from llamactl_supervisor.api_settings import ApiSettings

log = logging.getLogger("llamactl.tokens")

TOKEN_CHARS_MIN = 16
"""64 random bits in hexadecimal; what is shorter can be guessed, or is a word."""
TOKEN_DISTINCT_MIN = 8
"""Different characters that a token has at least: one that repeats a few is no random one."""
TOKEN_BYTES_MAX = 4096
_MAKE = "openssl rand -hex 32"


class Scope(Enum):
    """What a token is good for."""

    READ = "read"
    ADMIN = "admin"


class TokenFile:
    """One token. A file that is unusable lets nobody in, and the log says why, once.

    Also from the beginning: a daemon that would not start for it left its engine to nobody.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._complaint = ""
        self._seen = self._stamp()
        self._token = self._reread()

    def matches(self, given: bytes) -> bool:
        """Whether `given` is the token; takes the same time for every wrong one."""
        stamp = self._stamp()
        if stamp != self._seen or self._token is None:
            self._seen, self._token = stamp, self._reread()
        return hmac.compare_digest(given, self._token or b"") and self._token is not None

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)  # noqa: PTH116 - the path is the user's own word
        except OSError:
            return None
        # Of the change, not of the content: chmod and chown count too.
        return found.st_dev, found.st_ino, found.st_ctime_ns

    def _reread(self) -> bytes | None:
        try:
            token = read(self._path)
        except LlamactlError as exc:
            if exc.message != self._complaint:
                log.error("%s: nobody is let in by it", exc.message)
                self._complaint = exc.message
            return None
        self._complaint = ""
        log.info("token read: %s", self._path)
        return token


class Tokens:
    """The tokens of the control API by what they are good for."""

    def __init__(self, settings: ApiSettings) -> None:
        paths = {Scope.ADMIN: settings.token_file, Scope.READ: settings.read_token_file}
        self._files = {scope: TokenFile(path) for scope, path in paths.items() if path is not None}

    def scope(self, given: bytes) -> Scope | None:
        """Return what `given` is good for; None: nothing."""
        found = [scope for scope, file in self._files.items() if file.matches(given)]
        return found[0] if found else None


def read(path: str) -> bytes:
    """Return the token; raises `invalid_request` for a file that is missing, open or no token."""
    try:
        # Not blocking: a pipe in its place must not hold up the daemon.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            text = file.read(TOKEN_BYTES_MAX + 1) or b""
    except OSError as exc:
        raise _unusable(path, f"cannot be read: {exc.strerror or exc}", _make(path)) from exc
    if not stat.S_ISREG(found.st_mode):
        raise _unusable(path, "is no file", _make(path))
    if found.st_uid not in {0, os.geteuid()}:
        raise _unusable(path, f"belongs to uid {found.st_uid}", f"chown {os.geteuid()} {path}")
    if found.st_mode & 0o077:
        raise _unusable(path, "is open to others", f"chmod 600 {path}; make a new token in it")
    token = text.strip()
    if len(text) > TOKEN_BYTES_MAX:
        raise _unusable(path, f"has more than {TOKEN_BYTES_MAX} bytes", _make(path))
    if (wrong := _weakness(token)) is not None:
        raise _unusable(path, wrong, _make(path))
    return token


def _weakness(token: bytes) -> str | None:
    """Return why nobody should be let in by it, without repeating it; None: it may."""
    if not token:
        return "is empty"
    if not all(ord("!") <= byte <= ord("~") for byte in token):
        return "holds no token: one line of printable ASCII characters without blanks"
    if len(token) < TOKEN_CHARS_MIN:
        return f"holds a token that can be guessed: it has less than {TOKEN_CHARS_MIN} characters"
    if len(set(token)) < TOKEN_DISTINCT_MIN:
        return (
            "holds a token that can be guessed: it has less than "
            f"{TOKEN_DISTINCT_MIN} different characters"
        )
    return None


def _make(path: str) -> str:
    return f"(umask 077; {_MAKE} > {shlex.quote(path)})"


def _unusable(path: str, what: str, hint: str) -> LlamactlError:
    return error(Code.INVALID_REQUEST, f"the token file {path} {what}", hint=hint)
