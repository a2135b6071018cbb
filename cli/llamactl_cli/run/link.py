"""One HTTP/1.1 request to the daemon's control socket, and its answer line by line."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LINE_BYTES_MAX = 2**20


class UnreachableError(Exception):
    """Nobody answers on the control socket, or the answer broke off in its head."""


class DeclinedError(Exception):
    """The daemon answered with a problem (code, message, hint, details)."""

    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(str(problem.get("message", "")))
        self.problem = problem


class Link:
    """An answer that is being received. Its end, however it comes, ends `lines`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._chunked = False
        self._length = 0

    @classmethod
    async def open(cls, path: str, method: str, target: str, body: object = None) -> Self:
        """Send the request and return its answer, if it is 200.

        Raises `UnreachableError`, `DeclinedError`.
        """
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {target} HTTP/1.1\r\nHost: llamactl\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
        except OSError as exc:
            raise UnreachableError(f"{path}: {exc.strerror or exc}") from exc
        link = cls(reader, writer)
        try:
            writer.write(head.encode() + data)
            await link._read_head()
        except (OSError, EOFError, ValueError) as exc:
            link.close()
            raise UnreachableError(f"{path}: the answer broke off") from exc
        except BaseException:
            link.close()
            raise
        return link

    async def _read_head(self) -> None:
        status = int((await self._reader.readuntil(b"\r\n")).split()[1])
        while (line := (await self._reader.readuntil(b"\r\n")).strip().lower()) != b"":
            name, _, value = line.partition(b":")
            if name == b"content-length":
                self._length = int(value)
            elif name == b"transfer-encoding":
                self._chunked = b"chunked" in value
        if status != 200:
            text = await self.whole()
            try:
                problem = json.loads(text)
            except ValueError:
                problem = None
            known = isinstance(problem, dict) and "message" in problem
            raise DeclinedError(
                problem if known else {"code": "internal", "message": f"HTTP status {status}"}
            )

    async def _chunks(self) -> AsyncIterator[bytes]:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            if not self._chunked:
                yield await self._reader.readexactly(self._length)
                return
            while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)

    async def whole(self) -> bytes:
        """Return all of the answer."""
        return b"".join([chunk async for chunk in self._chunks()])

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield whole lines without their end, until the answer or the connection ends."""
        partial = b""
        async for chunk in self._chunks():
            *whole, partial = (partial + chunk).split(b"\n")
            for line in whole:
                yield line

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


class SilentError(UnreachableError):
    """Somebody has the control socket, and does not answer in time."""


async def ask(path: str, target: str, within_s: float) -> bytes:
    """Return what a read answers. Raises `UnreachableError`, `SilentError`, `DeclinedError`."""
    link = None
    try:
        async with asyncio.timeout(within_s):
            link = await Link.open(path, "GET", target)
            return await link.whole()
    except TimeoutError as exc:
        raise SilentError(f"{path}: no answer within {within_s:g} s") from exc
    finally:
        if link is not None:
            link.close()
