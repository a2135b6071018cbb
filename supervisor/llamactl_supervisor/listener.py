"""The control API's sockets: bound by us, the unix one at 0600 and open to our own uid alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from llamactl_supervisor.errors import Code, error, http_status
from llamactl_supervisor.models import PROBLEM_TYPE, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from llamactl_supervisor.api_settings import Address
    from llamactl_supervisor.errors import LlamactlError

BACKLOG = 128
CONNECTIONS_MAX = 64
"""Most connections at once to each TCP address."""
SELDOM_S = 60.0
"""How often a line is written about requests that are none."""
REQUEST_S = 10.0
"""How long a request may take from its connection, or the answer before it, to its last byte."""


def bind(path: Path) -> socket.socket:
    """Bind the socket. Only for the holder of the daemon's lock: what lies there is then stale."""
    path.unlink(missing_ok=True)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        control.bind(str(path))
        control.listen(BACKLOG)
    except OSError:
        control.close()
        raise
    finally:
        os.umask(mask)
    control.setblocking(False)
    return control


def bind_tcp(address: Address) -> socket.socket:
    """Bind the address. Raises `daemon_start_failed`."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as exc:
        listening.close()
        raise error(
            Code.DAEMON_START_FAILED,
            f"the control API cannot listen on {address}: {exc.strerror or exc}",
            hint="choose another address: listen or probes_listen in [api] of the configuration",
        ) from exc
    listening.setblocking(False)
    return listening


class _Timed(H11Protocol):
    """Ends connections that do not come to the end of a request: nobody waits for them for ever.

    uvicorn itself bounds only the time between two requests. What goes wrong before there is a
    request to hand on is answered here, in the shape of every other error.
    """

    _request_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect_nothing()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state in {h11.IDLE, h11.SEND_BODY}:
            self._expect_request()
        else:
            self._expect_nothing()

    def _expect_request(self) -> None:
        if self._request_due is None and not self.transport.is_closing():
            self._request_due = self.loop.call_later(REQUEST_S, self._late)

    def send_400_response(self, _: str) -> None:
        self._refuse(error(Code.INVALID_REQUEST, "the request is no HTTP/1.1"))

    def _late(self) -> None:
        begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        if begun and self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            message = f"the request has not come to its end within {REQUEST_S:g} s"
            self._refuse(error(Code.REQUEST_TIMED_OUT, message))
        else:  # nothing was asked, or it is being answered: any more would be taken for an answer
            self.transport.abort()

    def _refuse(self, exc: LlamactlError) -> None:
        body = Problem.of(exc).model_dump_json().encode()
        headers = [
            ("Content-Type", PROBLEM_TYPE),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        for event in (
            h11.Response(status_code=http_status(exc), headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect_nothing(self) -> None:
        if self._request_due is not None:
            self._request_due.cancel()
            self._request_due = None


class _Bounded(_Timed):
    """Drops connections beyond a bound: strangers must not use up the daemon's descriptors.

    The one that has waited longest for a request goes; the new one may have something to ask.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # One that was dropped a moment ago is among them until its end has come round.
        open_ = [each for each in self.connections if not each.transport.is_closing()]
        if len(open_) > CONNECTIONS_MAX:
            _longest_idle(open_).transport.abort()


def _longest_idle(connections: Iterable[Any]) -> _Timed:
    """Return the connection that is due first for want of a request; the newest is one of them."""
    idle: list[tuple[float, _Timed]] = [
        (each._request_due.when(), each) for each in connections if each._request_due
    ]
    return min(idle, key=lambda pair: pair[0])[1]


class _OwnUid(_Timed):
    """Drops connections of other users; names the caller's process as the request's client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        size = struct.calcsize("3i")
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, uid, _ = struct.unpack("3i", raw)
        self.client = (f"uid {uid} pid {pid}", pid)
        if uid not in {0, os.geteuid()}:
            transport.abort()


class Seldom(logging.Filter):
    """Lets one line of a kind through in `SELDOM_S`: who sends garbage must not fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written; it says how many like it were not."""
        kind = str(record.msg)
        if time.monotonic() < self._next.get(kind, 0.0):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._next[kind] = time.monotonic() + SELDOM_S
        if left_out := self._left_out.pop(kind, 0):
            record.msg = f"{kind} ({left_out} more like this since the last line)"
        return True


class Server(uvicorn.Server):
    """uvicorn without hands on our signals: TERM and INT are the daemon's to interpret."""

    def __init__(self, app: Any, listening: socket.socket, close_s: float) -> None:
        self._listening = listening
        config = uvicorn.Config(
            app,
            http=_OwnUid if listening.family == socket.AF_UNIX else _Bounded,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a caller is who connects, not whom a header names
            timeout_graceful_shutdown=max(1, round(close_s)),
        )
        super().__init__(config)

    async def run_here(self) -> None:
        """Serve on this loop until `should_exit`."""
        await self.serve(sockets=[self._listening])

    async def move(self, listening: socket.socket) -> None:
        """Listen there from now on; the connections that there are go on."""

        def protocol() -> H11Protocol:
            state = self.lifespan.state
            return _OwnUid(config=self.config, server_state=self.server_state, app_state=state)

        moved = await asyncio.get_running_loop().create_server(protocol, sock=listening)
        for before in self.servers:
            before.close()
        self.servers = [moved]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
