"""Brings back all that files hold, each conversation to its place in the engine that serves now."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from llamactl_supervisor import carry
from llamactl_supervisor import events as ev
from llamactl_supervisor.carry import Conversation, Manifest, Place
from llamactl_supervisor.errors import Code, LlamactlError
from llamactl_supervisor.models import (
    CarriedConversation,
    CarryFate,
    CarryReport,
    OperationKind,
    Problem,
)
from llamactl_supervisor.progress import ANSWER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llamactl_supervisor.carriage import Carriage
    from llamactl_supervisor.models import FileReceipt

log = logging.getLogger("llamactl.carrier")


class Bringing:
    """One bringing back of all that files hold."""

    def __init__(self, carriage: Carriage, effect: ev.CarryIn) -> None:
        self._carriage, self._effect = carriage, effect
        self._until = time.monotonic() + carriage.settings.carry_s
        self._manifest = Manifest()
        self._told: dict[str, CarriedConversation] = {}

    def _report(self, problem: Problem | None = None) -> CarryReport:
        return CarryReport(conversations=tuple(self._told.values()), problem=problem)

    async def run(self) -> CarryReport:
        """Return where each conversation is now, or why it is still in its files."""
        try:
            self._client = self._carriage.client(self._effect.process)
            self._manifest = await self._carriage.read()
            await self._bring_all()
        except LlamactlError as exc:
            log.error("conversations stay in files: %s", exc.message)
            return self._report(Problem.of(exc))
        return self._report()

    async def _bring_all(self) -> None:
        """Bring back what fits, each to its place; a slot that came to nothing is another's."""
        effect, carriage = self._effect, self._carriage
        instance, found = effect.process.instance_id, self._manifest.conversations
        if any(each.origin == instance for each in found):
            return  # it has served, whatever is remembered of that, and holds them as it did
        slots = range(await carriage.n_seq(effect.process, effect.request))
        if self._manifest.held_by(instance):
            await self._empty(slots)
        taker = await carriage.taker(effect.process, effect.request)
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
            if place is not None and place.page is not None and place.home is not None
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
        bytes_max = self._carriage.settings.carry_left_bytes_max
        dropped = carry.surplus(self._manifest.conversations, bytes_max)
        for each in dropped:
            why = f"{bytes_max} bytes are kept of what is left (daemon.carry_left_bytes_max)"
            self._told[each.file] = each.told(CarryFate.DROPPED, None, why)
        self._manifest = await self._carriage.forget(self._manifest, dropped)

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
        self._carriage.post(self._effect.generation, text, self._report())
        # Written first: whoever finds the engine serving knows that it has it.
        known = {"into": self._effect.process.instance_id, "reason": None}
        into = each.model_copy(update=known)
        self._manifest = self._manifest.add([into])
        await self._carriage.write(self._manifest)
        left_s = self._until - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                receipt = await self._restore(each, place)
        except TimeoutError:
            limit_s = self._carriage.settings.carry_s
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
                out = ev.Page("", OperationKind.PAGE_OUT, place.page, slot, place.home)
                await self._client.page(out)
            except LlamactlError:
                # It stays in its files: in the slot it would be there a second time.
                await self._client.erase(slot, timeout_s=ANSWER_S)
                raise
        return receipt
