"""A listener by itself: what never comes to the end of a request does not stay."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import pytest
from llamactl_supervisor import listener
from llamactl_supervisor.api_settings import Address
from llamactl_supervisor.listener import Server, bind, bind_tcp
from llamactl_supervisor.models import Problem
from sandbox import WITHIN_S

if TYPE_CHECKING:
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
    loop = asyncio.get_running_loop()
    answer = b""
    with socket.socket(listening.family) as caller:
        caller.setblocking(False)
        await loop.sock_connect(caller, listening.getsockname())
        await loop.sock_sendall(caller, start)
        with contextlib.suppress(ConnectionError):
            while True:
                with contextlib.suppress(TimeoutError):
                    receiving = loop.sock_recv(caller, 1000)
                    if not (chunk := await asyncio.wait_for(receiving, listener.REQUEST_S / 5)):
                        break
                    answer += chunk
                if start[-1:] not in {b"", b"2", b"\n"}:
                    with contextlib.suppress(
                        ConnectionError
                    ):  # what came before is read all the same
                        await loop.sock_sendall(caller, b"x")
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
    answer = served(listening, start)
    assert answer.count(b"answered") == start.count(GET)
    head, _, body = answer.rpartition(b"\r\n\r\n")
    late = start not in {b"", GET}
    assert (b"HTTP/1.1 408 " in head) == late
    if late:
        assert head.endswith(b"Connection: close")
        assert Problem.model_validate_json(body).code == "request_timed_out"


def test_what_is_no_http_is_told_so_in_the_one_shape(listening: socket.socket) -> None:
    head, _, body = served(listening, b"HELO there\n\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"Content-Type: application/problem+json" in head
    assert Problem.model_validate_json(body).code == "invalid_request"


def test_a_whole_request_may_take_as_long_as_it_takes(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "REQUEST_S", 0.3)
    assert served(listening, GET).endswith(b"answered\r\n0\r\n\r\n")
