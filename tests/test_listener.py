"""A listener by itself: what never comes to the end of a request does not stay."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from llamactl_supervisor import listener
from llamactl_supervisor.api_settings import Address
from llamactl_supervisor.listener import Server, bind, bind_tcp
from sandbox import WITHIN_S

if TYPE_CHECKING:
    import socket
    from pathlib import Path

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
UNFINISHED = (
    b"",
    b"GET / HTTP/1.1\r\nHost: loc",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n12",
    GET + b"GET / HTTP/1.1\r\nHost: loc",
)


async def slow(_: Any, receive: Any, send: Any) -> None:
    """Answer the whole request, after longer than a request may take to come."""
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(2 * listener.REQUEST_S)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"answered"})


@pytest.fixture(params=["tcp", "unix"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> socket.socket:
    return bind_tcp(Address("127.0.0.1", 0)) if request.param == "tcp" else bind(tmp_path / "s")


async def trickle(listening: socket.socket, start: bytes) -> bytes:
    """Send `start`, then a byte at a time for ever; return what came until the end."""
    name = listening.getsockname()
    connecting = (
        asyncio.open_unix_connection(name)
        if isinstance(name, str)
        else asyncio.open_connection(*name)
    )
    reader, writer = await connecting
    writer.write(start)
    answer = b""
    with contextlib.suppress(ConnectionError):
        while not reader.at_eof():
            with contextlib.suppress(TimeoutError):
                answer += await asyncio.wait_for(reader.read(1000), listener.REQUEST_S / 5)
            if start[-1:] not in {b"", b"2", b"\n"}:
                writer.write(b"x")
    writer.close()
    return answer


def served(listening: socket.socket, start: bytes) -> bytes:
    async def run() -> bytes:
        server = Server(slow, listening, 1.0)
        serving = asyncio.create_task(server.run_here())
        try:
            return await asyncio.wait_for(trickle(listening, start), WITHIN_S)
        finally:
            server.should_exit = True
            await serving

    return asyncio.run(run())


@pytest.mark.parametrize("start", UNFINISHED, ids=["nothing", "head", "body", "second"])
def test_an_unfinished_request_is_dropped(
    listening: socket.socket, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "REQUEST_S", 0.3)
    assert served(listening, start).count(b"answered") == start.count(GET)


def test_a_whole_request_may_take_as_long_as_it_takes(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "REQUEST_S", 0.3)
    assert served(listening, GET).endswith(b"answered\r\n0\r\n\r\n")
