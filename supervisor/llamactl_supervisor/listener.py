"""The control socket: bound by us at 0600, open to our own uid, served on the daemon's own loop."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator
    from pathlib import Path

BACKLOG = 128


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


class _OwnUid(H11Protocol):
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

    def __init__(self, app: Any, close_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=_OwnUid,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=max(1, round(close_s)),
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
