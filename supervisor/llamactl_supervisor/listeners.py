"""Every listener of the control API: the unix socket, and over TCP what the settings ask for."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from llamactl_supervisor.body_limit import BodyLimit
from llamactl_supervisor.control import create_app, create_probes
from llamactl_supervisor.guard import Guard
from llamactl_supervisor.listener import Server, bind, bind_tcp
from llamactl_supervisor.tokens import Tokens

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from llamactl_supervisor.api_settings import ApiSettings
    from llamactl_supervisor.control import Supervisor


log = logging.getLogger("llamactl.listeners")


class Listeners:
    """Bound when they are made; they answer from `start` to `close`."""

    def __init__(
        self,
        daemon: Supervisor,
        version: str,
        control: Path,
        handed: socket.socket | None,
        api: ApiSettings,
        close_s: float,
    ) -> None:
        """Bind; the unix socket only if it was not `handed` over.

        Raises `daemon_start_failed`, and `invalid_request` for an unusable token file.
        """
        app = BodyLimit(create_app(daemon, version))
        self._control, self._ours = control, handed is None
        self._addresses = {"api": api.listen, "probes": api.probes_listen}
        self._serving: list[asyncio.Task[None]] = []
        self._servers: list[Server] = []
        with ExitStack() as undo:

            def add(served: Any, listening: socket.socket) -> None:
                undo.callback(listening.close)
                self._servers.append(Server(served, listening, close_s))

            if api.listen is not None:
                add(Guard(app, api.listen, Tokens(api)), bind_tcp(api.listen))
            if api.probes_listen is not None:
                add(BodyLimit(create_probes(daemon)), bind_tcp(api.probes_listen))
            add(app, handed or bind(control))
            undo.pop_all()

    def start(self) -> None:
        """Answer from now on."""
        log.info("control socket=%s pid=%d", self._control, os.getpid())
        for what, address in self._addresses.items():
            if address is not None:
                log.info("%s listen=%s", what, address)
        self._serving = [asyncio.create_task(server.run_here()) for server in self._servers]

    def vanish(self) -> None:
        """Remove the unix socket: who comes now is told that there is no daemon.

        One that was handed over stays: who comes now waits for the next daemon.
        """
        if self._ours:
            self._control.unlink(missing_ok=True)

    async def close(self) -> None:
        """Answer what was asked, for as long as `close_s`, and end."""
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(*self._serving)
