"""One HTTP call to the daemon over its unix socket, and what its failures mean."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from llamactl_supervisor import asking, locks
from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.models import Problem

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from llamactl_supervisor.paths import Paths

ANSWER_S = 10.0
"""How long the daemon may take to answer where it does not have to ask the engine."""

READ_BYTES = 65536
NOT_BEGUN = "what it has not begun by now it will not do"
"""What becomes of a change without an answer: it has expired."""

_Shape = TypeVar("_Shape", bound=BaseModel)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket. The standard library's: it is imported in a fifth of the time."""

    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__("llamactl", timeout=timeout_s)
        self._path = path
        self.reached = False

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
        self.reached = True


class Transport:
    """Opens a connection for each call, so that nothing is left to close.

    Raises `daemon_unreachable` where nothing answers, `other_version` for an answer that is not
    understood, and otherwise the error that the daemon reported.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def call(
        self,
        shape: type[_Shape],
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> _Shape:
        """Return the answer as a `shape`, if it is there within `timeout_s` seconds."""
        with closing(self._connect(timeout_s)) as connection:
            expiry = {} if method == "GET" else asking.until(timeout_s)
            answer = self._ask(connection, method, path, body, expiry)
            try:
                return shape.model_validate_json(answer.read())
            except (OSError, http.client.HTTPException) as exc:
                raise self._unreachable(exc, asked=method != "GET") from exc
            except ValidationError as exc:
                raise error(
                    Code.OTHER_VERSION,
                    f"{method} {path}: the daemon's answer is no {shape.__name__} of this version",
                    hint="restart the daemon after an upgrade: llamactl down, then llamactl up",
                    details={"problem": str(exc)},
                ) from exc

    def lines(self, path: str, *, timeout_s: float | None) -> Generator[str, None, None]:
        """Yield the answer's lines without their ends, until it ends.

        `timeout_s`: how many seconds may pass between two of them; None: any number. A daemon that
        ends in order ends its answers; one that is killed is `daemon_unreachable`.
        """
        with closing(self._connect(timeout_s)) as connection:
            answer, rest = self._ask(connection, "GET", path), b""
            try:
                # Not line by line: the library takes a torn answer for one that has ended.
                while data := answer.read1(READ_BYTES):
                    *whole, rest = (rest + data).split(b"\n")
                    yield from (line.decode(errors="replace") for line in whole)
            except (OSError, http.client.HTTPException) as exc:
                raise self._unreachable(exc, asked=False) from exc
            if rest:
                yield rest.decode(errors="replace")

    def _connect(self, timeout_s: float | None) -> _UnixConnection:
        return _UnixConnection(self._paths.control_socket, timeout_s)

    def _ask(
        self,
        connection: _UnixConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        expiry: Mapping[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        """Return a good answer, not yet read; raise the problem that the daemon reports."""
        data = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        headers |= expiry or {}
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            if answer.status < http.client.BAD_REQUEST:
                return answer
            text = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            asked = method != "GET" and connection.reached
            raise self._unreachable(exc, asked=asked) from exc
        try:
            raise Problem.model_validate_json(text).to_error()
        except ValidationError:
            raise error(
                Code.INTERNAL, f"{method} {path}: the daemon answered HTTP {answer.status}"
            ) from None

    def _unreachable(self, exc: Exception, *, asked: bool) -> LlamactlError:
        """Return what it means; `asked`: a change was, and what came of it is said as well."""
        socket = self._paths.control_socket
        # Somebody listens; `pid` in the details tells it from a daemon that is not there.
        listens = isinstance(exc, TimeoutError | BlockingIOError)
        if listens and (pid := locks.owner(self._paths.daemon_lock)) is not None:
            fate = f"; {NOT_BEGUN}" if asked else ""
            return error(
                Code.DAEMON_UNREACHABLE,
                f"the daemon (pid {pid}) does not answer{fate}",
                hint=f"it is busy or stopped: `kill -CONT {pid}`, or see {self._paths.daemon_log}",
                details={"control_socket": str(socket), "pid": pid},
            )
        if asked:
            return error(
                Code.DAEMON_UNREACHABLE,
                f"the daemon ended before its answer ({exc}): what it was asked may be done or not",
                hint="`llamactl status` tells, once a daemon runs: start one with `llamactl up`",
                details={"control_socket": str(socket)},
            )
        return error(
            Code.DAEMON_UNREACHABLE,
            f"no daemon answers on {socket}: {exc}",
            hint="start one with `llamactl up`",
            details={"control_socket": str(socket)},
        )
