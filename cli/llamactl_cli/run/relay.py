"""The relay: bytes from every connection on our port to the engine's socket, and back.

It knows no HTTP. A side that reads slowly stops the reading on the other; the end of one direction
is passed on and leaves the other open, for a client that has said all and listens on.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import cast

from llamactl_supervisor.hold import Hold

BACKLOG = 512
"""Connections that may wait to be accepted; llama-server's own."""
BUFFER_BYTES = 65536
"""Read at once."""


class _Side(asyncio.BufferedProtocol):
    """One end of a relayed connection."""

    other: _Side
    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def get_buffer(self, _: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        # What cannot be sent at once is copied by the transport: the buffer is free again.
        self.other.transport.write(self._view[:count])

    def eof_received(self) -> bool:
        self.ended = True
        if self.other.ended:
            self.other.transport.close()
            return False
        self.other.transport.write_eof()
        return True

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.other.transport.close()
        else:
            _reset(self.other.transport)


class _Client(_Side):
    """The caller's end. Nothing is read from it before the engine has taken the connection."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self._relay.clients.add(self)
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, engine = await loop.create_unix_connection(_Side, self._relay.way())
        except OSError:
            _reset(self.transport)  # as near to "connection refused" as can be said by now
            return
        self.other, engine.other = engine, self
        if self.transport.is_closing():
            _reset(engine.transport)
        else:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay.clients.discard(self)
        if hasattr(self, "other"):
            super().connection_lost(exc)


def _reset(transport: asyncio.Transport) -> None:
    """End a connection so that the other side takes it for no ordinary end."""
    end: socket.socket | None = transport.get_extra_info("socket")
    if end is not None and not transport.is_closing():
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class Relay:
    """Relays what comes to a bound socket, from `start` to `close`; where to, may change meanwhile.

    A socket that is bound and does not listen yet refuses connections, and keeps its address.
    """

    def __init__(self, bound: socket.socket) -> None:
        self._engine = ""
        self._hold: Hold | None = None
        self.clients: set[_Client] = set()
        self._bound = bound
        self._server: asyncio.Server | None = None
        self._started = False

    def lead_to(self, engine: str) -> None:
        """Relay to this unix socket from now on; connections that there are stay as they are."""
        if engine != self._engine:
            self._let_go()
            self._engine, self._hold = engine, Hold(Path(engine))

    async def start(self) -> bool:
        """Listen; False: it does already. Raises OSError where another took the address."""
        if self._hold is not None:
            self._hold.look()  # the engine answers: it is held from now on
        if self._started:
            return False
        self._started = True
        loop = asyncio.get_running_loop()
        make = lambda: _Client(self)  # noqa: E731 - create_server wants a factory
        self._server = await loop.create_server(make, sock=self._bound, backlog=BACKLOG)
        return True

    def way(self) -> str:
        """Return what leads to the engine's socket. Raises OSError where there is no engine yet."""
        if self._hold is None:
            raise ConnectionRefusedError
        self._hold.look()
        return self._hold.path

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.close()
        self._engine, self._hold = "", None

    def close(self) -> None:
        """Refuse connections from now on, and end every one there is."""
        self._let_go()
        if self._server is None:
            self._bound.close()
        else:
            self._server.close()
        for client in list(self.clients):
            client.transport.close()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen: it refuses, and nobody else can have it.

    Raises OSError.
    """
    flags = socket.AI_PASSIVE
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


async def answers(path: str) -> bool:
    """Whether somebody accepts connections on the unix socket."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True
