"""Whether a TCP port of this machine is free, and if not, who has it."""

from __future__ import annotations

import asyncio
import errno
import socket

import psutil

from llamactl_supervisor.errors import Code, LlamactlError, error

WHO_S = 3.0
"""How long the search for the port's holder may take; it walks over every process."""
COMMAND_CHARS_MAX = 120


async def check_free(host: str, port: int) -> None:
    """Raise `port_in_use`, naming the process that listens there if it can be known."""
    try:
        _bind(host, port)
    except PermissionError as exc:
        raise error(
            Code.INVALID_REQUEST, f"port {port} cannot be bound: {exc.strerror}", hint="use 1024 up"
        ) from None
    except OSError as exc:
        if exc.errno == errno.EADDRNOTAVAIL:
            message = f"{host} is no address of this machine"
            raise error(Code.INVALID_REQUEST, message, hint="127.0.0.1 is the default") from None
        raise await _in_use(host, port, exc) from None


def _bind(host: str, port: int) -> None:
    """Bind as the engine will: SO_REUSEADDR passes over connections in TIME_WAIT."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)


async def _in_use(host: str, port: int, exc: OSError) -> LlamactlError:
    details: dict[str, object] = {"host": host, "port": port, "pid": None, "command": None}
    who = "an unknown process (another user's?)"
    try:
        found = await asyncio.wait_for(asyncio.to_thread(_listener, port), WHO_S)
    except (TimeoutError, psutil.Error):
        found = None
    if found is not None:
        details |= {"pid": found[0], "command": found[1]}
        who = f"pid {found[0]} ({found[1]})"
    return error(
        Code.PORT_IN_USE,
        f"{host}:{port} cannot be bound ({exc.strerror}): it is in use by {who}",
        hint="choose another --port, or stop that process",
        details=details,
    )


def _listener(port: int) -> tuple[int, str] | None:
    for connection in psutil.net_connections(kind="tcp"):
        listening = connection.status == psutil.CONN_LISTEN
        if listening and connection.laddr[1:] == (port,) and connection.pid is not None:
            process = psutil.Process(connection.pid)
            return connection.pid, process.name()[:COMMAND_CHARS_MAX]
    return None
