"""Generations in the background of a scenario: how far they are, and what they wrote in the end."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from llamactl_validate.expecting import Failed, expect_that, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from llamactl_validate.asked import Asked, Json
    from llamactl_validate.engine import Engine

_T = TypeVar("_T")


class Stream:
    """One streamed completion, read on a thread of its own."""

    def __init__(self, live: Asked, body: Json, pool: ThreadPoolExecutor) -> None:
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
        until(
            f"a stream comes to {n_chunks} chunks",
            lambda: self.n_chunks >= n_chunks or self.ended,
            within_s=self._live.patience_s,
        )
        if self.ended:
            self._end.result()
        if self.n_chunks < n_chunks:
            raise Failed(f"a stream ended after {self.n_chunks} chunks, before {n_chunks}")

    def result(self) -> Json:
        """Wait for the end; what it wrote as one answer."""
        self._end.result(self._live.patience_s * 4)
        last = self.chunks[-1]
        expect_that("the stream came to its end", last["stop"], last)
        return {**last, "content": "".join(chunk["content"] for chunk in self.chunks)}

    @property
    def text(self) -> str:
        text: str = self.result()["content"]
        return text


class Streams:
    """Starts generations; none is left running at the end of the block."""

    def __init__(self, live: Asked, pool: ThreadPoolExecutor) -> None:
        self._live = live
        self._pool = pool

    def start(self, **body: object) -> Stream:
        """Stream a completion."""
        return Stream(self._live, body, self._pool)

    def submit(self, what: Callable[[], _T]) -> Future[_T]:
        """Do something else in the background."""
        return self._pool.submit(what)


@contextmanager
def streams(live: Asked, at_most: int = 16) -> Iterator[Streams]:
    """Yield what starts generations in the background."""
    with ThreadPoolExecutor(at_most) as pool:
        yield Streams(live, pool)


@contextmanager
def streaming_socket(live: Engine, **body: object) -> Iterator[None]:
    """Stream a completion on a connection that is closed at the end of the block."""
    text = json.dumps(body | {"stream": True})
    head = f"POST /completion HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(text)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(live.patience_s)
        client.connect(str(live.socket))
        client.sendall((head + text).encode())
        said = client.recv(20)
        expect_that("a stream begins", said.startswith(b"HTTP/1.1 200"), said)
        yield


def hang_up(live: Engine, n: int) -> None:
    """Ask for a long answer and close the connection after its first bytes."""
    with streaming_socket(live, prompt=f"Tell me about the number {n}", n_predict=500):
        pass
