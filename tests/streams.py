"""Generations in the background of a test: how far they are, and what they wrote in the end."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from sandbox import WITHIN_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from live_engine import LiveEngine

Json = dict[str, Any]
_T = TypeVar("_T")


class Stream:
    """One streamed completion, read on a thread of its own."""

    def __init__(self, live: LiveEngine, body: Json, pool: ThreadPoolExecutor) -> None:
        self.chunks: list[Json] = []
        self._live = live
        self._end = pool.submit(self._read, body)

    def _read(self, body: Json) -> None:
        # Without pings a stream that is never continued ends at the client's timeout.
        for event in self._live.events("/completion", body | {"sse_ping_interval": -1}):
            self.chunks.append(event)

    @property
    def n_chunks(self) -> int:
        return len(self.chunks)

    @property
    def ended(self) -> bool:
        return self._end.done()

    def reach(self, n_chunks: int) -> None:
        """Wait until so many chunks have come, or the end."""
        until(lambda: self.n_chunks >= n_chunks or self.ended)
        if self.ended:
            self._end.result()
        assert self.n_chunks >= n_chunks

    def result(self) -> Json:
        """Wait for the end; what it wrote as one answer."""
        self._end.result(WITHIN_S * 4)
        last = self.chunks[-1]
        assert last["stop"]
        return {**last, "content": "".join(chunk["content"] for chunk in self.chunks)}

    @property
    def text(self) -> str:
        text: str = self.result()["content"]
        return text


class Streams:
    """Starts generations; none is left running at the end of the block."""

    def __init__(self, live: LiveEngine, pool: ThreadPoolExecutor) -> None:
        self._live = live
        self._pool = pool

    def start(self, **body: object) -> Stream:
        """Stream a completion."""
        return Stream(self._live, body, self._pool)

    def submit(self, what: Callable[[], _T]) -> Future[_T]:
        """Do something else beside the test."""
        return self._pool.submit(what)


@contextmanager
def streams(live: LiveEngine, at_most: int = 16) -> Iterator[Streams]:
    """Yield what starts generations beside the test."""
    with ThreadPoolExecutor(at_most) as pool:
        yield Streams(live, pool)


@contextmanager
def streaming_socket(live: LiveEngine, **body: object) -> Iterator[None]:
    """Stream a completion on a connection that is closed at the end of the block."""
    text = json.dumps(body | {"stream": True})
    head = f"POST /completion HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(text)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), WITHIN_S) as client:
        client.sendall((head + text).encode())
        assert client.recv(20).startswith(b"HTTP/1.1 200")
        yield
