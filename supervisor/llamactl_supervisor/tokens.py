"""Bearer tokens in files that only their owner can read, read again whenever they change."""

from __future__ import annotations

import hmac
import logging
import os
import stat
from enum import Enum
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, LlamactlError, error

if TYPE_CHECKING:
    from llamactl_supervisor.api_settings import ApiSettings

log = logging.getLogger("llamactl.tokens")

TOKEN_BYTES_MAX = 4096
_MAKE = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"


class Scope(Enum):
    """What a token is good for."""

    READ = "read"
    ADMIN = "admin"


class TokenFile:
    """One token. A file that becomes unusable lets nobody in, and the log says why, once."""

    def __init__(self, path: str) -> None:
        """Read the token. Raises `invalid_request`."""
        self._path = path
        self._complaint = ""
        self._seen = self._stamp()
        self._token: bytes | None = _read(path)

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
            token = _read(self._path)
        except LlamactlError as exc:
            if exc.message != self._complaint:
                log.error("%s: nobody is let in by it", exc.message)
                self._complaint = exc.message
            return None
        self._complaint = ""
        log.info("token read again: %s", self._path)
        return token


class Tokens:
    """The tokens of the control API by what they are good for."""

    def __init__(self, settings: ApiSettings) -> None:
        """Read them. Raises `invalid_request` for a file that is missing, open or no token."""
        paths = {Scope.ADMIN: settings.token_file, Scope.READ: settings.read_token_file}
        self._files = {scope: TokenFile(path) for scope, path in paths.items() if path is not None}

    def scope(self, given: bytes) -> Scope | None:
        """Return what `given` is good for; None: nothing."""
        found = [scope for scope, file in self._files.items() if file.matches(given)]
        return found[0] if found else None


def _read(path: str) -> bytes:
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
    printable = token.isascii() and token.decode("ascii").isprintable() and b" " not in token
    if not token or len(text) > TOKEN_BYTES_MAX or not printable:
        raise _unusable(path, "holds no token: one line of printable characters", _make(path))
    return token


def _make(path: str) -> str:
    return f"(umask 077; {_MAKE} > {path})"


def _unusable(path: str, what: str, hint: str) -> LlamactlError:
    return error(Code.INVALID_REQUEST, f"the token file {path} {what}", hint=hint)
