"""The relay of `llamactl run`: every byte in both directions, whatever the two sides do."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from typing import TYPE_CHECKING, TypeVar

import pytest
from llamactl_cli.run.relay import Relay, answers
from sandbox import WITHIN_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
    from pathlib import Path

    Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
    Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

T = TypeVar("T")
CHUNKS = 5000
TURNS = 10
"""Of the loop, from the close of a transport to its end."""
FLOOD_BYTES = 64 * 2**20


def played(scene: Coroutine[None, None, T]) -> T:
    """Run the scene to its end, and on until everything that it closed is closed."""

    async def whole() -> T:
        result = await asyncio.wait_for(scene, WITHIN_S)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), WITHIN_S)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return result

    return asyncio.run(whole())


def bind() -> socket.socket:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.setblocking(False)
    return bound


@contextlib.asynccontextmanager
async def relayed(directory: Path, serve: Serve) -> AsyncIterator[tuple[Relay, int]]:
    """Yield a relay that listens, before an engine that is `serve`."""
    path = str(directory / "e.sock")
    engine = await asyncio.start_unix_server(serve, path)
    bound = bind()
    relay = Relay(bound)
    relay.lead_to(path)
    await relay.start()
    try:
        yield relay, bound.getsockname()[1]
    finally:
        relay.close()
        engine.close()


async def closed(relay: Relay) -> None:
    """Return once the relay has no connection left."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert not relay.clients


def chunk(number: int) -> bytes:
    return b"%d:" % number + b"x" * (number % 97)


async def send_chunks(writer: asyncio.StreamWriter) -> None:
    for number in range(CHUNKS):
        writer.write(chunk(number))
        await writer.drain()
    writer.write_eof()


def test_thousands_of_small_chunks_come_through_both_ways_at_once(tmp_path: Path) -> None:
    """Each side says all it has and then that it has ended; the other still talks."""
    wanted = hashlib.sha256(b"".join(map(chunk, range(CHUNKS)))).hexdigest()
    heard: list[str] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sending = asyncio.create_task(send_chunks(writer))
        heard.append(hashlib.sha256(await reader.read()).hexdigest())
        await sending
        writer.close()

    async def scene() -> None:
        async with relayed(tmp_path, talk) as (_, port):
            ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            await asyncio.gather(*(talk(*each) for each in ends))

    played(scene())
    assert heard == [wanted] * 8


def test_who_has_said_all_is_still_answered(tmp_path: Path) -> None:
    """A half-closed connection: the engine sees the end, and answers after it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.read()
        writer.write(b"you said " + asked)
        writer.close()

    async def scene() -> bytes:
        async with relayed(tmp_path, serve) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"all")
            writer.write_eof()
            answer = await reader.read()
            writer.close()
            return answer

    assert played(scene()) == b"you said all"


@pytest.mark.parametrize("reads_slowly", ["client", "engine"])
def test_a_slow_reader_stops_the_writer_and_loses_nothing(
    tmp_path: Path, reads_slowly: str
) -> None:
    """The relay holds no more than its buffers, however much there is to come."""
    sent = 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(ConnectionError):
            while sent < FLOOD_BYTES:
                writer.write(b"y" * 65536)
                await writer.drain()
                sent += 65536
        writer.close()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting.set_result(reader)
        await read.wait()
        writer.close()

    async def stalled() -> None:
        """Return once nothing more is taken from the writer."""
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)

    waiting: asyncio.Future[asyncio.StreamReader]
    read = asyncio.Event()

    async def scene() -> int:
        nonlocal waiting
        waiting = asyncio.get_running_loop().create_future()
        client, engine = (wait, flood) if reads_slowly == "client" else (flood, wait)
        async with relayed(tmp_path, engine) as (_, port):
            ends = await asyncio.open_connection("127.0.0.1", port, limit=65536)
            talking = asyncio.create_task(_as_task(client, ends))
            reader = await waiting
            await stalled()
            held = sent
            taken = 0
            while block := await reader.read(2**20):
                taken += len(block)
            assert taken == FLOOD_BYTES
            read.set()
            await talking
            ends[1].close()
            return held

    assert played(scene()) < FLOOD_BYTES // 2


async def _as_task(talk: Serve, ends: Ends) -> None:
    await talk(*ends)


def test_before_it_listens_its_port_is_taken_and_refuses() -> None:
    async def scene() -> None:
        bound = bind()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", bound.getsockname()[1])
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(bound.getsockname())
        Relay(bound).close()

    played(scene())


def test_where_no_engine_answers_the_connection_is_reset(tmp_path: Path) -> None:
    async def scene() -> None:
        bound = bind()
        relay = Relay(bound)
        relay.lead_to(path := str(tmp_path / "nobody.sock"))
        await relay.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", bound.getsockname()[1])
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        relay.close()
        assert not await answers(path)

    played(scene())


def test_an_engine_whose_socket_lost_its_name_is_still_found(tmp_path: Path) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        writer.close()

    async def scene() -> None:
        async with relayed(tmp_path, serve) as (relay, port):
            (tmp_path / "e.sock").unlink()
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                assert await reader.read() == b"here"
                writer.close()
            relay.lead_to(str(tmp_path / "another.sock"))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()

    played(scene())


def test_a_client_that_hangs_up_is_a_client_that_hangs_up(tmp_path: Path) -> None:
    """The engine is to see it: only so does it stop to compute for nobody."""
    hung_up = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"z" * 100)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()
        hung_up.set()

    async def scene() -> None:
        async with relayed(tmp_path, serve) as (relay, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await reader.readexactly(1000)
            writer.transport.abort()
            await hung_up.wait()
            await closed(relay)

    played(scene())


def test_close_ends_every_connection_and_the_port(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"begun")
        await reader.read()
        writer.close()

    async def scene() -> None:
        async with relayed(tmp_path, serve) as (relay, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.readexactly(5) == b"begun"
            relay.close()
            assert await reader.read() == b""
            writer.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)

    played(scene())
