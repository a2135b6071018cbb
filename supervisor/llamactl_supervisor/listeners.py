"""Every listener of the control API: the unix socket, and over TCP what the settings ask for."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from llamactl_supervisor.body_limit import BodyLimit
from llamactl_supervisor.control import create_app, create_probes
from llamactl_supervisor.errors import Code, LlamactlError
from llamactl_supervisor.guard import Guard
from llamactl_supervisor.listener import Seldom, Server, bind, bind_tcp
from llamactl_supervisor.models import Problem
from llamactl_supervisor.tokens import Tokens

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator
    from pathlib import Path

    from llamactl_supervisor.api_settings import ApiSettings
    from llamactl_supervisor.control import Supervisor
    from llamactl_supervisor.locks import Held

log = logging.getLogger("llamactl.listeners")

LOOK_S = 2.0
"""Pause between two looks whether the unix socket is still there."""


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

        Raises `daemon_start_failed`. A token file that is unusable lets nobody in until it is good.
        """
        app = BodyLimit(create_app(daemon, version))
        logging.getLogger("uvicorn.error").addFilter(Seldom())
        self._control = control
        self._addresses = {"api": api.listen, "probes": api.probes_listen}
        self._serving: list[asyncio.Task[None]] = []
        self._servers: list[Server] = []
        self._vanished = False
        with ExitStack() as undo:

            def add(served: Any, listening: socket.socket) -> None:
                undo.callback(listening.close)
                self._servers.append(Server(served, listening, close_s))

            if api.listen is not None:
                add(Guard(app, api.listen, Tokens(api)), bind_tcp(api.listen))
            if api.probes_listen is not None:
                add(BodyLimit(create_probes(daemon)), bind_tcp(api.probes_listen))
            add(app, handed or bind(control))
            self._handed, self._bound = handed is not None, _file(control)
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

        One that was handed over stays: who comes now waits for the next daemon. So does one that
        another daemon has bound meanwhile.
        """
        self._vanished = True
        if not self._handed and _file(self._control) == self._bound:
            self._control.unlink(missing_ok=True)

    async def keep(self, owned: Held) -> AsyncIterator[Problem | None]:
        """Bind the unix socket again whenever it is gone, for ever.

        Whatever cleans up temporary files, or the end of a login session, may take it. Yields each
        new reason why no client finds it, and None once one does again.
        """
        told: Problem | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            found = await self._look(owned)
            if found != told:
                if found is not None:
                    log.error("%s (%s)", found.message, found.hint)
                told = found
                yield told

    async def _look(self, owned: Held) -> Problem | None:
        server = self._servers[-1]
        if self._vanished or not server.started or _file(self._control) == self._bound:
            return None
        gone = f"the control socket {self._control} is gone"
        if self._handed:
            return Problem(
                code=Code.CONTROL_SOCKET_GONE,
                message=f"{gone}: systemd goes on to listen where no client can connect",
                hint="restart both units together, the engine lives on: "
                "systemctl restart llamactl.socket llamactl.service (with --user, if it is yours)",
            )
        try:
            owned.paths.create()
            owned.renew()  # what takes the socket takes the lock beside it, too
            await server.move(bind(self._control))
        except (OSError, LlamactlError) as exc:
            return Problem(
                code=Code.CONTROL_SOCKET_GONE,
                message=f"{gone} and cannot be bound again: {exc}",
                hint="it is tried again until it can",
            )
        self._bound = _file(self._control)
        if self._vanished:  # meanwhile
            self.vanish()
        log.warning("%s: bound again", gone)
        return None

    async def close(self) -> None:
        """Answer what was asked, for as long as `close_s`, and end."""
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(*self._serving)


def _file(path: Path) -> tuple[int, int] | None:
    """Return which file this is now, whatever its name; None for none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
