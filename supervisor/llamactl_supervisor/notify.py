"""What the service manager is told: sd_notify(3), one datagram for each message.

Without a manager that listens, nothing is sent and nothing fails.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import MutableMapping

log = logging.getLogger("llamactl.notify")

ADDRESS = "NOTIFY_SOCKET"
WATCHDOG_USEC = "WATCHDOG_USEC"
WATCHDOG_PID = "WATCHDOG_PID"
USEC_PER_S = 1_000_000


class Notifier:
    """The manager's socket. `watchdog_s`: how often it wants a sign of life, None for never."""

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = None if address is None else _decoded(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    @classmethod
    def take_from(cls, env: MutableMapping[str, str]) -> Self:
        """Return the notifier that `env` asks for, and take it out: it is meant for us alone.

        A value that makes no sense is logged and ignored, as sd_notify does.
        """
        address = env.pop(ADDRESS, "")
        usec, pid = env.pop(WATCHDOG_USEC, ""), env.pop(WATCHDOG_PID, str(os.getpid()))
        if address and address[0] not in "/@":
            log.warning("%s=%r is neither a path nor an abstract name: ignored", ADDRESS, address)
            address = ""
        wanted = address and usec and pid == str(os.getpid())
        if wanted and not (usec.isascii() and usec.isdigit() and int(usec)):
            log.warning("%s=%r is no number of microseconds: ignored", WATCHDOG_USEC, usec)
            wanted = ""
        return cls(address or None, int(usec) / USEC_PER_S if wanted else None)

    def __bool__(self) -> bool:
        """Whether anybody is told anything."""
        return self._address is not None

    def send(self, *assignments: str) -> bool:
        """Send `NAME=VALUE` lines as one message; False when it could not be sent. Never waits.

        What would make another line of a value is made a space.
        """
        if self._address is None:
            return True
        lines = ("".join(c if c.isprintable() else " " for c in line) for line in assignments)
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError as exc:
            log.warning("the service manager could not be told %s: %s", assignments[0], exc)
            return False
        return True

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()


def _decoded(address: str) -> str:
    """Return the address as the socket wants it: an abstract name is written with @ for NUL."""
    return f"\0{address[1:]}" if address.startswith("@") else address
