"""A port of TCP that nobody has."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

FREE_PORTS = (10_000, 32_768)
"""The first one, and the first that Linux gives to outgoing connections."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody has.

    It is none of those that the kernel gives to whoever connects: until an engine listens on it,
    another program's connection could take such a one.
    """
    chance = random.SystemRandom()  # the other one begins alike wherever hypothesis runs a test
    while True:
        port = chance.randrange(*FREE_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
