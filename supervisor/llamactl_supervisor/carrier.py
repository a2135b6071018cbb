"""Carries conversations from one engine into the next: quiet, files, manifest, and back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import carry, instances, launch, mute, preflight, procfs, store
from llamactl_supervisor import events as ev
from llamactl_supervisor.carry import Conversation, Manifest, Place, Taker
from llamactl_supervisor.errors import UNANSWERED, Code, LlamactlError, RefusedError, error
from llamactl_supervisor.models import (
    CarriedConversation,
    CarryFate,
    CarryReport,
    OperationKind,
    PageReceipt,
    Problem,
    SlotState,
)
from llamactl_supervisor.process import ends
from llamactl_supervisor.progress import ANSWER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Sequence

    from llamactl_supervisor.engine import EngineClient
    from llamactl_supervisor.models import EngineProcess, FileReceipt, UpRequest
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.settings import Settings

log = logging.getLogger("llamactl.carrier")

DRAIN_POLL_S = 0.1
"""Pause between two questions whether anything still goes on."""
NAMES_S = 2.0
"""How long a busy engine may take to say what it holds, before that has to be known."""
RETRY_S = 0.5
"""Pause between two tries to let an engine go on that does not answer."""
ROUNDS_MAX = 3
"""A page verb that was under way moves a conversation from where it was seen; not for ever."""
NOT_THERE = frozenset({Code.EMPTY_SLOT, Code.UNKNOWN_PAGE})
"""Nothing is held where something was thought to be: no loss."""


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
            writing = _Out(self, effect)
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
            report = await _In(self, effect).run()
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


class _Out:
    """One writing of all that an engine holds."""

    def __init__(self, carrier: Carrier, effect: ev.CarryOut) -> None:
        self._carrier, self._effect = carrier, effect
        self._began = time.monotonic()
        self._n_cut = 0
        self._is_drained = False
        self.hung_up = False
        self._told: dict[str, CarriedConversation] = {}

    def _report(self, problem: Problem | None = None) -> CarryReport:
        took_s = time.monotonic() - self._began
        return CarryReport(
            conversations=tuple(self._told.values()),
            took_s=took_s,
            quiet_s=took_s,
            n_cut=self._n_cut,
            problem=problem,
        )

    async def run(self) -> CarryReport:
        """Return what is in files, what is not and why."""
        try:
            self._client = self._carrier.client(self._effect.process)
            to = self._effect.to
            if to is not None and not await self._carrier.takes(to):
                await self._lose_all("the next engine cannot take it: it cannot begin quiet")
                if self._told:
                    return self._report()
            if not await self._drain():
                why = "it cannot be kept: the engine is of a build that does not know /quiesce"
                await self._lose_all(why)
                return self._report()
            await self._write_all()
        except LlamactlError as exc:
            self.hung_up |= exc.code in UNANSWERED
            return self._report(Problem.of(exc))
        return self._report()

    def _go_on_to(self, text: str) -> None:
        """Say what is waited for from now on."""
        log.info("%s", text)
        self._post(text)

    def _post(self, text: str) -> None:
        generation, report = self._effect.generation, self._report()
        self._carrier.post(generation, text, report, is_drained=self._is_drained)

    async def _drain(self) -> bool:
        """Return once nothing is in progress any more; False: the engine does not know this."""
        drain_s, named = self._carrier.settings.drain_s, False
        self._go_on_to(f"asking the engine to be quiet, {_until(drain_s)}")
        while True:
            is_cut = self._carrier.is_cut(self._effect.generation)
            left_s = 0.0 if is_cut else drain_s - (time.monotonic() - self._began)
            try:
                told = await self._client.quiesce(is_quiet=True, cut=left_s <= 0, timeout_s=drain_s)
            except LlamactlError as exc:
                raise error(exc.code, f"the engine did not become quiet: {exc.message}") from exc
            if told is None:
                return False
            self._n_cut += told.n_cut
            if not told.n_processing:
                self._is_drained = True
                return True
            if not named:
                await self._name_all()
                named = True
                continue
            if left_s <= 0:
                raise error(Code.TIMED_OUT, f"{told.n_processing} requests could not be ended")
            number = told.n_processing
            requests = "1 request" if number == 1 else f"{number} requests"
            text = f"waiting for {requests} to end, {_until(left_s)}"
            self._post(text)
            await asyncio.sleep(min(DRAIN_POLL_S, left_s))

    async def _name_all(self) -> None:
        """Name what would be lost if the engine ended before it is quiet, where it soon says so."""
        with contextlib.suppress(LlamactlError, TimeoutError):
            async with asyncio.timeout(NAMES_S):
                await self._lose_all("the engine ended before it was written")

    async def _lose_all(self, why: str) -> None:
        """Name what the engine holds as lost, for this reason."""
        taker = await self._carrier.taker(self._effect.process, self._effect.request)
        for each in await self._held(taker, set()):
            self._tell(each, CarryFate.LOST, why)

    async def _write_all(self) -> None:
        carrier, seen = self._carrier, set[tuple[Place, int]]()
        self._told.clear()
        until = time.monotonic() + carrier.settings.carry_s
        manifest = await carrier.read()
        taker = await carrier.taker(self._effect.process, self._effect.request)
        for _ in range(ROUNDS_MAX):
            new = await self._held(taker, seen)
            if not new:
                break
            seen |= {(each.was, each.n_tokens) for each in new}
            for each in new:
                self._tell(each, CarryFate.LOST, "the engine ended before it was written")
            manifest = manifest.add(new)
            await carrier.write(manifest)
            for number, each in enumerate(new, 1):
                left_s = until - time.monotonic()
                self._go_on_to(f"writing {number} of {len(new)} conversations, {_until(left_s)}")
                kept = await self._write(each, until)
                manifest = manifest.drop({each.file}).add([] if kept is None else [kept])
                told = self._told.get(each.file)
                if told is not None and told.fate is CarryFate.LOST and not self._effect.may_lose:
                    for other in new[number:]:
                        self._tell(other, CarryFate.LOST, "not tried, for another was not written")
                    return
        try:
            await carrier.write(manifest)
        except LlamactlError as exc:
            # What is on the disk names them all; it only does not say which have been written.
            log.error("%s", exc.message)

    def _tell(self, conversation: Conversation, fate: CarryFate, reason: str | None = None) -> None:
        place = conversation.file if fate is CarryFate.WRITTEN else None
        self._told[conversation.file] = conversation.told(fate, place, reason)

    async def _held(self, taker: Taker, seen: set[tuple[Place, int]]) -> list[Conversation]:
        slots, pages = await self._slots(), (await self._client.pages()).pages
        instance = self._effect.process.instance_id
        return carry.held(slots, pages, instance=instance, engine=taker, seen=seen)

    async def _slots(self) -> tuple[SlotState, ...]:
        if (await self._client.props()).work.is_sleeping:
            return ()  # it has let go of what they held, and would load its weights to say so
        self._go_on_to(f"asking what its slots hold, for {mute.MUTE_S:g} s if it does nothing")
        engine, what = self._effect.process.engine, "what its slots hold"
        try:
            return (await mute.answer(self._client.slots(), engine, what)).slots
        except LlamactlError as exc:
            if exc.code != Code.NOT_SUPPORTED:
                raise
        # Started with --no-slots: each may hold something.
        n_seq = await _n_seq(self._client, self._effect.request)
        return tuple(SlotState(id=slot, n_ctx=0) for slot in range(n_seq))

    async def _write(self, conversation: Conversation, until: float) -> Conversation | None:
        """Return what the manifest is to say of it; None: nothing, for certain it is in no file."""
        left_s = until - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                receipt = await self._client.page_file(_verb(conversation))
        except TimeoutError:
            limit_s = self._carrier.settings.carry_s
            why = f"not written within {limit_s:g} s (daemon.carry_s)"
            self._tell(conversation, CarryFate.LOST, why)
            return conversation
        except LlamactlError as exc:
            if exc.code in NOT_THERE:
                del self._told[conversation.file]
                return None
            self.hung_up |= exc.code in UNANSWERED
            self._tell(conversation, CarryFate.LOST, exc.message)
            return None if isinstance(exc, RefusedError) else conversation
        known = {"n_tokens": receipt.n_tokens, "n_bytes": receipt.n_written or 0, "written": True}
        kept = conversation.model_copy(update=known)
        self._tell(kept, CarryFate.WRITTEN)
        return kept


class _In:
    """One bringing back of all that files hold."""

    def __init__(self, carrier: Carrier, effect: ev.CarryIn) -> None:
        self._carrier, self._effect = carrier, effect
        self._until = time.monotonic() + carrier.settings.carry_s
        self._manifest = Manifest()
        self._told: dict[str, CarriedConversation] = {}

    def _report(self, problem: Problem | None = None) -> CarryReport:
        return CarryReport(conversations=tuple(self._told.values()), problem=problem)

    async def run(self) -> CarryReport:
        """Return where each conversation is now, or why it is still in its files."""
        try:
            self._client = self._carrier.client(self._effect.process)
            self._manifest = await self._carrier.read()
            await self._bring_all()
        except LlamactlError as exc:
            log.error("conversations stay in files: %s", exc.message)
            return self._report(Problem.of(exc))
        return self._report()

    async def _bring_all(self) -> None:
        """Bring back what fits, each to its place; a slot that came to nothing is another's."""
        effect, carrier = self._effect, self._carrier
        instance, found = effect.process.instance_id, self._manifest.conversations
        if any(each.origin == instance for each in found):
            return  # it has served, whatever is remembered of that, and holds them as it did
        slots = range(await _n_seq(self._client, effect.request))
        if self._manifest.held_by(instance):
            await self._empty(slots)
        taker = await carrier.taker(effect.process, effect.request)
        refused = {each.file: taker.refusal(each) for each in found}
        for each in found:
            if (why := refused[each.file]) is not None:
                self._leave(each, why)
        order = carry.placed([each for each in found if refused[each.file] is None], slots)
        free: list[int] = []
        for each, place in order:
            if place is None:
                why = "no slot is free for it" if each.page is None else "another page has its name"
                self._leave(each, why)
            elif not await self._bring(each, place) and place.page is None:
                assert place.slot is not None
                free.append(place.slot)
        await self._fill(free, order)
        await self._bound()

    async def _fill(
        self, free: list[int], order: Sequence[tuple[Conversation, Place | None]]
    ) -> None:
        """Give slots that are free after all to pages that were made for want of one, then to what
        was left for want of one.
        """
        paged = [
            (each, place.page)
            for each, place in order
            if place is not None and place.page is not None and each.slot is not None
            if self._told[each.file].fate is CarryFate.BACK
        ]
        left = [each for each, place in order if place is None and each.slot is not None]
        while free and (paged or left):
            slot = free.pop(0)
            if not paged:
                if not await self._bring(left.pop(0), Place(slot)):
                    free.append(slot)
                continue
            each, page = paged.pop(0)
            try:
                await self._client.page(ev.Page("", OperationKind.PAGE_IN, page, slot))
            except LlamactlError as exc:
                log.error("page %s could not be put into slot %d: %s", page, slot, exc.message)
                continue
            known = {"place": str(Place(slot))}
            self._told[each.file] = self._told[each.file].model_copy(update=known)

    async def _bound(self) -> None:
        """Drop what no engine has taken, the oldest first, where it is more than is to be kept."""
        bytes_max = self._carrier.settings.carry_left_bytes_max
        dropped = carry.surplus(self._manifest.conversations, bytes_max)
        for each in dropped:
            why = f"{bytes_max} bytes are kept of what is left (daemon.carry_left_bytes_max)"
            self._told[each.file] = each.told(CarryFate.DROPPED, None, why)
        self._manifest = await self._carrier.forget(self._manifest, dropped)

    def _leave(self, each: Conversation, why: str) -> None:
        left = each.model_copy(update={"into": None, "reason": why})
        self._manifest = self._manifest.add([left])
        self._told[each.file] = each.told(CarryFate.LEFT, each.file, why)

    async def _empty(self, slots: range) -> None:
        """Begin anew what another daemon did not bring to its end; all of it is still in files."""
        for page in (await self._client.pages()).pages:
            await self._client.page(ev.Page("", OperationKind.PAGE_DROP, page.name))
        for slot in slots:
            await self._client.erase(slot, timeout_s=ANSWER_S)

    async def _bring(self, each: Conversation, place: Place) -> bool:
        """Bring it there and say whether it is."""
        n_all = len(self._manifest.conversations)
        text = f"bringing back {min(len(self._told) + 1, n_all)} of {n_all} conversations"
        self._carrier.post(self._effect.generation, text, self._report())
        # Written first: whoever finds the engine serving knows that it has it.
        known = {"into": self._effect.process.instance_id, "reason": None}
        into = each.model_copy(update=known)
        self._manifest = self._manifest.add([into])
        await self._carrier.write(self._manifest)
        left_s = self._until - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                receipt = await self._restore(each, place)
        except TimeoutError:
            limit_s = self._carrier.settings.carry_s
            self._leave(each, f"not brought back within {limit_s:g} s (daemon.carry_s)")
            return False
        except LlamactlError as exc:
            if exc.code == Code.NO_FILE:
                why = "its files are gone" if each.written else "it was not written to the end"
                self._manifest = self._manifest.drop({each.file})
                self._told[each.file] = each.told(CarryFate.LOST, None, why)
            else:
                self._leave(each, exc.message)
            return False
        without = ", ".join(f"{lost.file}: {lost.why}" for lost in receipt.lost or ())
        reason = f"without {without}" if without else None
        self._told[each.file] = each.told(CarryFate.BACK, str(place), reason)
        return True

    async def _restore(self, each: Conversation, place: Place) -> FileReceipt:
        slot = place.slot
        assert slot is not None
        restore = ev.PageFile("", OperationKind.PAGE_RESTORE, each.file, slot)
        receipt = await self._client.page_file(restore)
        if place.page is not None:
            try:
                await self._client.page(ev.Page("", OperationKind.PAGE_OUT, place.page, slot))
            except LlamactlError:
                # It stays in its files: in the slot it would be there a second time.
                await self._client.erase(slot, timeout_s=ANSWER_S)
                raise
        return receipt


def _until(left_s: float) -> str:
    """Return the end of a wait as a person reads it: it is shown for all of that time."""
    end = datetime.now(UTC) + timedelta(seconds=max(0.0, left_s))
    return f"until {end.astimezone():%H:%M:%S} at the latest"


def _verb(conversation: Conversation) -> ev.PageFile:
    """Return what writes it to its files; slot or page keep it."""
    file, slot = conversation.file, conversation.slot
    if slot is not None:
        return ev.PageFile("", OperationKind.PAGE_SAVE, file, slot)
    return ev.PageFile("", OperationKind.PAGE_SPILL, file, page=conversation.page)


async def _n_seq(client: EngineClient, request: UpRequest) -> int:
    """Return how many slots the engine has."""
    geometry = (await client.props()).geometry
    return request.spec.n_seq if geometry is None else geometry.n_seq


def _remove(gone: Collection[Conversation]) -> None:
    """Remove the files of these conversations; the sidecars first: none is left without its own."""
    for each in gone:
        for suffix in reversed(carry.FILE_SUFFIXES):
            path = Path(each.directory, f"{each.file}{suffix}")
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                log.error("%s stays: %s", path, exc.strerror)
