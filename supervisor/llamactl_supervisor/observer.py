"""Looks at one engine until its end: for its health while it loads, for its progress afterwards."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor import instances, process
from llamactl_supervisor.errors import Code, LlamactlError
from llamactl_supervisor.models import Problem
from llamactl_supervisor.progress import Observation, Progress, observe

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamactl_supervisor.engine import EngineClient
    from llamactl_supervisor.events import EngineFacts, EngineProcess, Event
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.progress import Wedge
    from llamactl_supervisor.settings import Settings

log = logging.getLogger("llamactl.observer")


class Observer:
    """Posts what it sees of the engine's process `generation`.

    It asks for /health and /props alone: /slots wakes an engine that sleeps, /metrics resets what
    others measure. `settings` are asked for anew each time: a reload may have changed them.
    """

    def __init__(
        self,
        paths: Paths,
        settings: Callable[[], Settings],
        post: Callable[[Event], None],
        generation: int,
        client: EngineClient,
    ) -> None:
        self._paths, self._settings, self._post = paths, settings, post
        self._generation, self._client = generation, client
        self._engine: EngineProcess = client.process
        self._complaint = ""

    async def run(self) -> None:
        """Look until the engine is wedged, or until cancelled."""
        await self._await_health()
        await self._await_wedge()

    async def _await_health(self) -> None:
        pulse = 0
        while True:
            last, pulse = pulse, self._pulse()
            if pulse != last:
                self._post(ev.Moved(self._generation))
            try:
                facts = await self._client.facts()
            except LlamactlError as exc:
                self._complain(exc)
            else:
                if facts is not None:
                    self._post(ev.Healthy(self._generation, facts, datetime.now(UTC)))
                    return
            await asyncio.sleep(self._settings().ready_poll_s)

    async def _await_wedge(self) -> None:
        progress, waking_since = Progress(), None
        while progress.wedge is None:
            await asyncio.sleep(self._settings().probe_s)
            asked_at = time.monotonic()
            try:
                facts = await self._client.props()
            except LlamactlError as exc:
                self._complain(exc)
                # An answer that makes no sense is one: whoever gives it is at work.
                if exc.code == Code.ENGINE_ANSWER_BROKEN:
                    progress = Progress()
                    continue
                facts = None
            activity = process.activity(self._engine.engine)
            if activity is None:
                return
            if facts is not None:
                waking_since = self._tell(facts, asked_at, waking_since)
            answer = None if facts is None else facts.work
            seen = Observation(time.monotonic(), answer, activity, self._pulse())
            before, progress = progress, observe(progress, seen, self._settings())
            self._note(before, progress)
        self._post(ev.Wedged(self._generation, _problem(progress.wedge)))

    def _tell(
        self, facts: EngineFacts, asked_at: float, waking_since: float | None
    ) -> float | None:
        """Post what the engine said; return since when it has been waking, if it is."""
        wakes = bool(facts.work.is_sleeping and facts.work.is_working)
        wake_s = None
        if not wakes and waking_since is not None:
            wake_s = asked_at - waking_since
        self._post(ev.Observed(self._generation, facts, asked_at, datetime.now(UTC), wake_s))
        return (waking_since or asked_at) if wakes else None

    def _note(self, before: Progress, after: Progress) -> None:
        """Log the beginning and the end of a standstill that is longer than a moment."""
        limit_s = self._settings().wedge_idle_s / 2
        was, still = before.standstill, after.standstill
        long_before = was is not None and was.still_s >= limit_s
        if still is not None and still.still_s >= limit_s and not long_before:
            log.warning(
                "engine pid=%d has not moved for %.0f s: answers=%s n_ubatches=%s idle_s=%.0f",
                *(self._engine.engine.pid, still.still_s, after.last and bool(after.last.answer)),
                *(after.n_ubatches, still.idle_s),
            )
        elif still is None and long_before:
            log.info("engine pid=%d moves again", self._engine.engine.pid)

    def _pulse(self) -> int:
        return instances.pulse(self._paths, self._engine.instance_id)

    def _complain(self, exc: LlamactlError) -> None:
        if exc.message != self._complaint:
            log.warning("engine: %s", exc.message)
            self._complaint = exc.message


def _problem(wedge: Wedge) -> Problem:
    return Problem(
        code=Code.ENGINE_WEDGED,
        message=f"the engine is wedged: {wedge.why}",
        hint="it is replaced; LLAMACTL_WEDGE_IDLE_S and LLAMACTL_WEDGE_BUSY_S set the limits",
        details=wedge.evidence,
    )
