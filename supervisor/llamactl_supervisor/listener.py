"""The control socket: bound by us or handed over, open to our own uid, on the daemon's own loop."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from llamactl_supervisor.errors import Code, error

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator, MutableMapping
    from pathlib import Path

BACKLOG = 128
LISTEN_FD = 3
"""The first descriptor that a service manager hands over, sd_listen_fds(3)."""


def inherited(env: MutableMapping[str, str], path: Path) -> socket.socket | None:
    """Return the socket that the service manager listens on for us, if it does.

    Takes the LISTEN_ variables out of `env`: they are meant for this process. Raises
    `invalid_request` where what was handed over is not one socket that listens at `path`: clients
    would look for the daemon in vain.
    """
    count, pid = env.pop("LISTEN_FDS", ""), env.pop("LISTEN_PID", "")
    env.pop("LISTEN_FDNAMES", None)
    if not count or pid != str(os.getpid()):
        return None
    if count != "1":
        raise error(
            Code.INVALID_REQUEST,
            f"LISTEN_FDS={count!r}: one socket is expected of the service manager",
            hint="the .socket unit has one ListenStream=",
        )
    try:
        os.set_inheritable(LISTEN_FD, False)
        handed = socket.socket(fileno=LISTEN_FD)
    except OSError as exc:
        what = f"descriptor {LISTEN_FD} ({exc.strerror})"
    else:
        if _listens_at(handed, path):
            handed.setblocking(False)
            return handed
        what = f"{handed.getsockname()!r} ({handed.family.name})"
        handed.close()
    raise error(
        Code.INVALID_REQUEST,
        f"the service manager handed over {what}, which does not listen at {path}",
        hint="ListenStream= of the .socket unit and LLAMACTL_RUNTIME_DIR of the .service name "
        "the same directory",
    )


def _listens_at(handed: socket.socket, path: Path) -> bool:
    listens = handed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not listens or handed.family is not socket.AF_UNIX:
        return False
    try:
        return path.samefile(os.fsdecode(handed.getsockname()))
    except (OSError, ValueError):  # there is no such file; an abstract name is none
        return False


def bind(path: Path) -> socket.socket:
    """Bind the socket. Only for the holder of the daemon's lock: what lies there is then stale."""
    path.unlink(missing_ok=True)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        control.bind(str(path))
    finally:
        os.umask(mask)
    control.listen(BACKLOG)
    control.setblocking(False)
    return control


class _OwnUid(H11Protocol):
    """Drops connections of other users; names the caller's process as the request's client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        size = struct.calcsize("3i")
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, uid, _ = struct.unpack("3i", raw)
        self.client = (f"uid {uid} pid {pid}", 0)
        if uid not in {0, os.geteuid()}:
            transport.abort()


class Server(uvicorn.Server):
    """uvicorn without hands on our signals: TERM and INT are the daemon's to interpret."""

    def __init__(self, app: Any, close_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=_OwnUid,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=max(1, round(close_s)),
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
