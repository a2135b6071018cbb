"""Writes all that an engine holds to files, once it is quiet, and says what of it is not there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from llamactl_supervisor import carry, mute
from llamactl_supervisor import events as ev
from llamactl_supervisor.carry import Conversation, Place, Taker
from llamactl_supervisor.errors import UNANSWERED, Code, LlamactlError, RefusedError, error
from llamactl_supervisor.models import (
    CarriedConversation,
    CarryFate,
    CarryReport,
    OperationKind,
    Problem,
    SlotState,
)

if TYPE_CHECKING:
    from llamactl_supervisor.carriage import Carriage
    from llamactl_supervisor.models import Quiet

log = logging.getLogger("llamactl.carrier")

DRAIN_POLL_S = 0.1
"""Pause between two questions whether anything still goes on."""
NAMES_S = 2.0
"""How long a busy engine may take to say what it holds, before that has to be known."""
ROUNDS_MAX = 3
"""A page verb that was under way moves a conversation from where it was seen; not for ever."""
NOT_THERE = frozenset({Code.EMPTY_SLOT, Code.UNKNOWN_PAGE})
"""Nothing is held where something was thought to be: no loss."""


class Writing:
    """One writing of all that an engine holds."""

    def __init__(self, carriage: Carriage, effect: ev.CarryOut) -> None:
        self._carriage, self._effect = carriage, effect
        settings, self._began = carriage.settings, time.monotonic()
        self._end = self._began + settings.drain_s + settings.carry_s
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
            self._client = self._carriage.client(self._effect.process)
            to = self._effect.to
            if to is not None and not await self._carriage.takes(to):
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
        self._carriage.post(generation, text, report, is_drained=self._is_drained)

    async def _drain(self) -> bool:
        """Return once nothing is in progress any more; False: the engine does not know this."""
        drain_s, named = self._carriage.settings.drain_s, False
        self._go_on_to(f"asking the engine to be quiet, {_until(self._end - self._began)}")
        while True:
            is_cut = self._carriage.is_cut(self._effect.generation)
            left_s = 0.0 if is_cut else drain_s - (time.monotonic() - self._began)
            told = await self._ask_for_quiet(cut=left_s <= 0)
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

    async def _ask_for_quiet(self, *, cut: bool) -> Quiet | None:
        """Have it be quiet, or cut as well; None: it does not know this.

        It answers between two batches. One may take longer than requests have to end: all that the
        engine holds is lost if it is not waited for, unless the engine does nothing at all.
        """
        engine, left_s = self._effect.process.engine, max(1.0, self._end - time.monotonic())
        asked = self._client.quiesce(is_quiet=True, cut=cut, timeout_s=left_s)
        try:
            return await mute.answer(asked, engine, "whether it is quiet")
        except LlamactlError as exc:
            raise error(exc.code, f"the engine did not become quiet: {exc.message}") from exc

    async def _name_all(self) -> None:
        """Name what would be lost if the engine ended before it is quiet, where it soon says so."""
        with contextlib.suppress(LlamactlError, TimeoutError):
            async with asyncio.timeout(NAMES_S):
                await self._lose_all("the engine ended before it was written")

    async def _lose_all(self, why: str) -> None:
        """Name what the engine holds as lost, for this reason."""
        taker = await self._carriage.taker(self._effect.process, self._effect.request)
        for each in await self._held(taker, set()):
            self._tell(each, CarryFate.LOST, why)

    async def _write_all(self) -> None:
        carriage, seen = self._carriage, set[tuple[Place, int]]()
        self._told.clear()
        until = min(self._end, time.monotonic() + carriage.settings.carry_s)
        manifest = await carriage.read()
        taker = await carriage.taker(self._effect.process, self._effect.request)
        for _ in range(ROUNDS_MAX):
            new = await self._held(taker, seen)
            if not new:
                break
            seen |= {(each.was, each.n_tokens) for each in new}
            for each in new:
                self._tell(each, CarryFate.LOST, "the engine ended before it was written")
            manifest = manifest.add(new)
            await carriage.write(manifest)
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
            await carriage.write(manifest)
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
        n_seq = await self._carriage.n_seq(self._effect.process, self._effect.request)
        return tuple(SlotState(id=slot, n_ctx=0) for slot in range(n_seq))

    async def _write(self, conversation: Conversation, until: float) -> Conversation | None:
        """Return what the manifest is to say of it; None: nothing, for certain it is in no file."""
        left_s = until - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                receipt = await self._client.page_file(_verb(conversation))
        except TimeoutError:
            limit_s = self._carriage.settings.carry_s
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
