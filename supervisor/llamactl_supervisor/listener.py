"""The control API's sockets: bound by us, the unix one at 0600 and open to our own uid alone."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from llamactl_supervisor.errors import Code, error

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator
    from pathlib import Path

    from llamactl_supervisor.api_settings import Address

BACKLOG = 128
CONNECTIONS_MAX = 64
"""Most connections at once to each TCP address."""
REQUEST_S = 10.0
"""How long a request may take from its connection, or the answer before it, to its last byte."""


def bind(path: Path) -> socket.socket:
    """Bind the socket. Only for the holder of the daemon's lock: what lies there is then stale."""
    path.unlink(missing_ok=True)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        control.bind(str(path))
    finally:
        os.umask(mask)
    control.listen(BACKLOG)
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
    """Drops connections that do not come to the end of a request: nobody waits for them for ever.

    uvicorn itself bounds only the time between two requests.
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
            self._request_due = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _expect_nothing(self) -> None:
        if self._request_due is not None:
            self._request_due.cancel()
            self._request_due = None


class _Bounded(_Timed):
    """Drops connections beyond a bound: strangers must not use up the daemon's descriptors."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()


class _OwnUid(_Timed):
    """Drops connections of other users; names the caller's process as the request's client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        size = struct.calcsize("3i")
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, uid, _ = struct.unpack("3i", raw)
        self.client = (f"uid {uid} pid {pid}", 0)
        if uid not in {0, os.geteuid()}:
            transport.abort()


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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
