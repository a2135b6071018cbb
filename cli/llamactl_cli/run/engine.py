"""The engine's process, as far as its owner sees it: its socket, its end, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamactl_cli.run import relay

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.05
HEALTH_S = 1.0
"""How long it may take to answer that; it does so at once, or never."""
RECORD_S = 5.0
"""How long after the engine its holder may take to write how it ended."""


class Engine:
    """One engine, from the moment that the daemon names it."""

    def __init__(self, instance_id: str, pid: int, path: str, gone: Callable[[], None]) -> None:
        self.instance_id, self.pid, self.socket = instance_id, pid, path
        self.is_gone = False
        self._told = gone
        try:
            self._fd = os.pidfd_open(pid)
        except OSError:
            self._fd = -1  # it has ended already: the daemon tells how
        else:
            asyncio.get_running_loop().add_reader(self._fd, self._ended)

    def _ended(self) -> None:
        self.forget()
        self.is_gone = True
        self._told()

    def forget(self) -> None:
        """Watch it no more."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    async def answers(self) -> None:
        """Return once it accepts connections."""
        answering = False
        while not answering:
            answering = await relay.answers(self.socket)
            if not answering:
                await asyncio.sleep(POLL_S)

    async def is_healthy(self) -> bool:
        """Whether it has loaded its model, asked of itself."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket)
        except OSError:
            return False
        try:
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            head = await asyncio.wait_for(reader.readline(), HEALTH_S)
        except (OSError, TimeoutError, ValueError):
            return False
        finally:
            writer.close()
        return head.split()[1:2] == [b"200"]

    async def record(self) -> dict[str, Any] | None:
        """Return what its holder has left of how it ended; None: it has left nothing."""
        deadline = time.monotonic() + RECORD_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                return await asyncio.to_thread(_read, Path(self.socket).with_name("exit.json"))
            await asyncio.sleep(POLL_S)
        return None


def _read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_bytes())
    return record
