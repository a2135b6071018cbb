"""What both ways of a conversation need: its engine, the manifest of its files, who takes it."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import carry, instances, launch, preflight, store
from llamactl_supervisor import events as ev
from llamactl_supervisor.carry import Conversation, Manifest, Taker
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import CarriedConversation, CarryFate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from llamactl_supervisor.engine import EngineClient
    from llamactl_supervisor.models import CarryReport, EngineProcess, UpRequest
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.settings import Settings

log = logging.getLogger("llamactl.carrier")


class Carriage:
    """`post` takes the events back to the daemon's loop."""

    def __init__(
        self,
        paths: Paths,
        settings: Callable[[], Settings],
        post: Callable[[ev.Event], None],
        client: Callable[[EngineProcess], EngineClient],
    ) -> None:
        self._paths, self._settings, self._post, self._client = paths, settings, post, client
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
