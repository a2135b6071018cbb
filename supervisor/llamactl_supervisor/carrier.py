"""Carries conversations from one engine into the next, and keeps the manifest of their files."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import carry, instances, launch, preflight, procfs, store
from llamactl_supervisor import events as ev
from llamactl_supervisor.carry import Conversation, Manifest, Taker
from llamactl_supervisor.carry_in import Bringing
from llamactl_supervisor.carry_out import Writing
from llamactl_supervisor.errors import Code, LlamactlError
from llamactl_supervisor.models import (
    CarriedConversation,
    CarryFate,
    CarryReport,
    PageReceipt,
)
from llamactl_supervisor.process import ends
from llamactl_supervisor.progress import ANSWER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from llamactl_supervisor.engine import EngineClient
    from llamactl_supervisor.models import EngineProcess, UpRequest
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.settings import Settings

log = logging.getLogger("llamactl.carrier")

RETRY_S = 0.5
"""Pause between two tries to let an engine go on that does not answer."""


class Carrier:
    """One carrying at a time. `post` takes the events back to the daemon's loop."""

    def __init__(
        self,
        paths: Paths,
        settings: Callable[[], Settings],
        post: Callable[[ev.Event], None],
        client: Callable[[EngineProcess], EngineClient],
    ) -> None:
        self._paths, self._settings, self._post, self._client = paths, settings, post, client
        self._one = asyncio.Lock()
        self._known = Manifest()
        self._cut: int | None = None

    def is_cut(self, generation: int) -> bool:
        """Say whether the requests of this engine have no more time."""
        return self._cut == generation

    async def awaited(self) -> bool:
        """Say whether files hold a conversation for the next engine."""
        try:
            return bool((await self.read()).conversations)
        except LlamactlError as exc:
            log.error("%s", exc.message)
            return False

    @property
    def in_files(self) -> tuple[int, int]:
        """How many conversations are in files alone, and how many bytes that is."""
        alone = [each for each in self._known.conversations if each.into is None]
        return len(alone), sum(each.n_bytes for each in alone)

    async def left(self) -> tuple[CarriedConversation, ...]:
        """Return what files hold that the engine did not take."""
        await self.awaited()
        return tuple(
            each.told(CarryFate.LEFT, each.file, each.reason)
            for each in self._known.conversations
            if each.is_left
        )

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
        async with self._one:
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
            if await self._go_on(effect.process) is not None:
                await self._forget(effect.process)

    async def _go_on(self, process: EngineProcess) -> ev.EngineFacts | None:
        """Let requests start, however long it takes; None: nobody listens there any more."""
        complaint = None
        while procfs.alive(process.engine):
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

    async def read(self) -> Manifest:
        """Return the manifest; one that makes no sense is set aside and named."""
        path = self._paths.carry_file
        manifest, aside = await asyncio.to_thread(store.read, path, Manifest)
        if aside is not None:
            log.error(
                "%s made no sense; set aside as %s. The conversations stay in their files, "
                "carry-*: `llamactl pages restore` takes them by name",
                *(path.name, aside),
            )
        self._known = manifest
        return manifest

    async def write(self, manifest: Manifest) -> None:
        """Replace the manifest durably."""
        await asyncio.to_thread(store.save, self._paths.carry_file, manifest)
        self._known = manifest

    def client(self, process: EngineProcess) -> EngineClient:
        """Return who talks to this engine."""
        return self._client(process)

    @property
    def settings(self) -> Settings:
        """The settings as they are now."""
        return self._settings()

    async def taker(self, process: EngineProcess, request: UpRequest) -> Taker:
        """Return which conversations this engine takes, as far as that can be known."""
        asked = await asyncio.to_thread(instances.asked, self._paths, process.instance_id)
        known = None if asked is None else asked.spec
        geometry = (await self._client(process).props()).geometry
        types = None if geometry is None else (geometry.cache_type_k, geometry.cache_type_v)
        return Taker(
            directory=str(launch.pages_dir(request, self._paths)),
            model=request.spec.model,
            content=None if known is None else known.model,
            cache_types=None if types is None or None in types else "/".join(map(str, types)),
        )

    async def n_seq(self, process: EngineProcess, request: UpRequest) -> int:
        """Return how many slots the engine has."""
        geometry = (await self._client(process).props()).geometry
        return request.spec.n_seq if geometry is None else geometry.n_seq

    async def takes(self, request: UpRequest) -> bool:
        """Say whether such an engine can be brought conversations before anybody asks it."""
        asked = request, None, self._paths, os.environ
        return await asyncio.to_thread(preflight.can_be_quiet, *asked)

    async def forget(self, manifest: Manifest, gone: Collection[Conversation]) -> Manifest:
        """Return the manifest without these, whose files are removed."""
        manifest = manifest.drop({each.file for each in gone})
        await self.write(manifest)
        await asyncio.to_thread(_remove, gone)
        return manifest

    def post(
        self, generation: int, progress: str, report: CarryReport, *, is_drained: bool = False
    ) -> None:
        """Say how far it is."""
        self._post(ev.CarryMoved(generation, progress, report, is_drained))


def _remove(gone: Collection[Conversation]) -> None:
    """Remove the files of these conversations; the sidecars first: none is left without its own."""
    for each in gone:
        for suffix in reversed(carry.FILE_SUFFIXES):
            path = Path(each.directory, f"{each.file}{suffix}")
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                log.error("%s stays: %s", path, exc.strerror)
