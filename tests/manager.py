"""A service manager for one daemon: it hears what the daemon notifies, and hands it a socket."""

from __future__ import annotations

import re
import socket
import time
from itertools import groupby
from typing import TYPE_CHECKING, Self

from sandbox import WITHIN_S

if TYPE_CHECKING:
    from pathlib import Path

MESSAGE_BYTES_MAX = 4096


class Manager:
    """Records the messages that come to its notify socket, in their order."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.settimeout(WITHIN_S)

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return one that listens at a path."""
        return cls(str(path))

    def message(self) -> str:
        """Return the next message."""
        return self._socket.recv(MESSAGE_BYTES_MAX).decode()

    def until(self, last: str) -> list[str]:
        """Return all messages up to one that begins with `last`, repetitions taken together.

        Of what differs in each run, the number is left out: pids and clocks.
        """
        said: list[str] = []
        deadline = time.monotonic() + WITHIN_S
        while not said or not said[-1].startswith(last):
            assert time.monotonic() < deadline, said
            timeless = re.sub(r"until \d\d:\d\d:\d\d", "until T", self.message())
            said.append(re.sub(r"(pid |MONOTONIC_USEC=)\d+", r"\1N", timeless))
        return [message for message, _ in groupby(said)]

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
