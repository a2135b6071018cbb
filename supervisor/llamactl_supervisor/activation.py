"""The control socket that a service manager listens on for us: sd_listen_fds(3)."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, error

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from pathlib import Path

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
        what = f"{_name(handed)} ({handed.family.name})"
        handed.close()
    raise error(
        Code.INVALID_REQUEST,
        f"the service manager handed over {what}, which does not listen at {path}",
        hint="ListenStream= of the .socket unit and LLAMACTL_RUNTIME_DIR of the .service name "
        "the same directory",
    )


def _name(handed: socket.socket) -> str:
    name = handed.getsockname()
    if handed.family is socket.AF_UNIX:
        return os.fsdecode(name).replace("\0", "@") or "a socket without a name"
    return ":".join(map(str, name[:2])) if isinstance(name, tuple) else str(name)


def _listens_at(handed: socket.socket, path: Path) -> bool:
    listens = handed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not listens or handed.family is not socket.AF_UNIX:
        return False
    try:
        return path.samefile(os.fsdecode(handed.getsockname()))
    except (OSError, ValueError):  # there is no such file; an abstract name is none
        return False
