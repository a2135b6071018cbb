"""Carries conversations from one engine into the next: quiet, files, and back."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor import procfs
from llamactl_supervisor.carriage import Carriage
from llamactl_supervisor.carry_in import Bringing
from llamactl_supervisor.carry_out import Writing
from llamactl_supervisor.errors import Code, LlamactlError
from llamactl_supervisor.models import PageReceipt
from llamactl_supervisor.process import ends
from llamactl_supervisor.progress import ANSWER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from llamactl_supervisor.engine import EngineClient
    from llamactl_supervisor.models import EngineProcess
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.settings import Settings

log = logging.getLogger("llamactl.carrier")

RETRY_S = 0.5
"""Pause between two tries to let an engine go on that does not answer."""


class Carrier(Carriage):
    """One carrying at a time."""

    def __init__(
        self,
        paths: Paths,
        settings: Callable[[], Settings],
        post: Callable[[ev.Event], None],
        client: Callable[[EngineProcess], EngineClient],
    ) -> None:
        super().__init__(paths, settings, post, client)
        self._one = asyncio.Lock()
        self._is_asked_out = False

    async def drop(self, file: str) -> PageReceipt | None:
        """Remove what the engine did not take and this file holds; None: there is no such file.

        Raises `state_unreadable` or `state_unwritable`.
        """
        began = time.monotonic()
        async with self._one:
            manifest = await self.read()
            found = [each for each in manifest.conversations if each.is_left and each.file == file]
            if not found:
                return None
            await self.forget(manifest, found)
        ms, (each,) = (time.monotonic() - began) * 1000, found
        return PageReceipt(
            id_slot=0, page=file, n_tokens=each.n_tokens, n_bytes=each.n_bytes, ms=ms
        )

    def run(
        self, effect: ev.CarryOut | ev.CarryCut | ev.CarryIn | ev.CarryOff
    ) -> Coroutine[None, None, None]:
        """Return what does this."""
        match effect:
            case ev.CarryOut():
                return self.out(effect)
            case ev.CarryCut():
                return self.cut(effect)
            case ev.CarryIn():
                return self.back(effect)
            case ev.CarryOff():
                return self.off(effect)

    async def out(self, effect: ev.CarryOut) -> None:
        """Have the engine be quiet, write what it holds, and post what came of it.

        Of an engine that ends meanwhile only that: its end is told by who watches it.
        """
        self._is_asked_out = True
        async with self._one:
            self._is_asked_out = False
            writing = Writing(self, effect)
            report = await writing.run()
        if writing.hung_up and await ends(effect.process.engine):
            self.post(effect.generation, "the engine has ended", report)
        else:
            self._post(ev.CarriedOut(effect.generation, report))

    async def cut(self, effect: ev.CarryCut) -> None:
        """Give the requests of this engine no more time, now or once it is asked to be quiet."""
        self._cut = effect.generation

    async def back(self, effect: ev.CarryIn) -> None:
        """Bring back what files hold, let the engine go on, and post what came of it.

        Nothing is posted of an engine that ends meanwhile: its files stay.
        """
        async with self._one:
            began = time.monotonic()
            report = await Bringing(self, effect).run()
            facts = await self._go_on(effect.process)
            if facts is None:
                return
            await self._forget(effect.process)
        took_s = time.monotonic() - began
        report = report.model_copy(update={"took_s": took_s, "quiet_s": took_s})
        self._post(ev.CarriedIn(effect.generation, report, facts, datetime.now(UTC)))

    async def off(self, effect: ev.CarryOff) -> None:
        """Let the engine go on; what it holds is in no file any more."""
        async with self._one:
            goes_on = await self._go_on(effect.process) is not None
            if goes_on or (self._is_asked_out and procfs.alive(effect.process.engine)):
                await self._forget(effect.process)

    async def _go_on(self, process: EngineProcess) -> ev.EngineFacts | None:
        """Let requests start, however long it takes; None: nobody listens, or it is to end now."""
        complaint = None
        while procfs.alive(process.engine) and not self._is_asked_out:
            try:
                client = self._client(process)
                await client.quiesce(is_quiet=False, timeout_s=ANSWER_S)
                return await client.props()
            except LlamactlError as exc:
                if exc.code == Code.ENGINE_SOCKET_GONE:
                    break
                if exc.message != complaint:
                    log.warning("the engine could not be told yet to go on: %s", exc.message)
                complaint = exc.message
            await asyncio.sleep(RETRY_S)
        return None

    async def _forget(self, process: EngineProcess) -> None:
        """Remove the files of what this engine holds."""
        try:
            manifest = await self.read()
            if held := manifest.held_by(process.instance_id):
                await self.forget(manifest, held)
        except LlamactlError as exc:
            log.error("conversations of the engine that serves stay in files: %s", exc.message)
