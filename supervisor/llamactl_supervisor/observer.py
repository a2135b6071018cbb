"""Looks at one engine until its end: for its health while it loads, for its progress afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor import instances, procfs
from llamactl_supervisor.errors import Code, LlamactlError
from llamactl_supervisor.models import Problem
from llamactl_supervisor.progress import Activity, Observation, Progress, observe, worked

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamactl_supervisor.engine import EngineClient
    from llamactl_supervisor.events import EngineFacts, EngineProcess, Event
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.progress import Wedge
    from llamactl_supervisor.settings import Settings

log = logging.getLogger("llamactl.observer")

COMPLAIN_S = 60.0
"""The same complaint is logged no more often."""


class Observer:
    """Posts what it sees of the engine's process `generation`.

    It asks for /health and /props alone: /slots wakes an engine that sleeps, /metrics resets what
    others measure. `settings` are asked for anew each time: a reload may have changed them. `now`
    stands still while the daemon does not run: what it did not see is no silence of the engine's.
    """

    def __init__(
        self,
        paths: Paths,
        settings: Callable[[], Settings],
        post: Callable[[Event], None],
        now: Callable[[], float],
        generation: int,
        client: EngineClient,
    ) -> None:
        self._paths, self._settings, self._post, self._now = paths, settings, post, now
        self._generation, self._client = generation, client
        self._engine: EngineProcess = client.process
        self._holder_stood = False
        self._complaints: dict[str, tuple[str, float]] = {}

    async def run(self) -> None:
        """Look until the engine is wedged, or until cancelled.

        A look that fails for a reason of our own (a limit of open files) is none: it counts
        neither for the engine nor against it.
        """
        await self._await_health()
        await self._await_wedge()

    async def _await_health(self) -> None:
        pulse, mark, marked_at, listens = 0, Activity(0.0), self._now(), False
        while True:
            last, pulse = pulse, self._pulse()
            activity = self._activity() or mark
            now = self._now()
            moved = pulse != last or worked(mark, activity, now - marked_at)
            if self._holder_stands() or moved:
                mark, marked_at = activity, now
                self._post(ev.Moved(self._generation))
            try:
                facts = await self._client.facts()
            except LlamactlError as exc:
                self._unheard(exc)
            else:
                if not listens:
                    listens = True
                    self._post(ev.Listens(self._generation))
                if facts is not None:
                    self._post(ev.Healthy(self._generation, facts, datetime.now(UTC)))
                    return
            await asyncio.sleep(self._settings().ready_poll_s)

    async def _await_wedge(self) -> None:
        progress, waking_since = Progress(), None
        while progress.wedge is None:
            await asyncio.sleep(self._settings().probe_s)
            asked_at = self._now()
            try:
                facts = await self._client.props()
            except LlamactlError as exc:
                self._unheard(exc)
                # An answer that makes no sense is one: whoever gives it is at work.
                if exc.code == Code.ENGINE_ANSWER_BROKEN:
                    progress = Progress()
                if exc.code not in {Code.ENGINE_UNREACHABLE, Code.ENGINE_UNPROVEN}:
                    continue
                facts = None
            activity = self._activity()
            if activity is None:
                continue
            if facts is not None:
                waking_since = self._tell(facts, asked_at, waking_since)
            if self._holder_stands():
                progress = replace(progress, standstill=None)
                continue
            answer = None if facts is None else facts.work
            seen = Observation(self._now(), answer, activity, self._pulse())
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
        problem = None if self._client.has_name() else self._nameless()
        at = datetime.now(UTC)
        self._post(ev.Observed(self._generation, facts, asked_at, at, wake_s, problem))
        return (waking_since or asked_at) if wakes else None

    def _nameless(self) -> Problem:
        path = self._paths.engine_dir(self._engine.instance_id) / "engine.sock"
        return Problem(
            code=Code.ENGINE_SOCKET_GONE,
            message=f"the engine's private socket {path} is gone from disk: this daemon still has "
            "hold of it, the next one will find no way to the engine",
            hint="`llamactl restart` when convenient, while this daemon runs: it keeps every "
            "conversation",
        )

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

    def _holder_stands(self) -> bool:
        """Say whether the holder is stopped, and tell of it; a person did that, and may undo it.

        An engine whose output nobody reads stands still sooner or later: no fault of its own.
        """
        holder, problem = self._engine.holder, None
        with contextlib.suppress(OSError):
            seen = None if holder is None else procfs.activity(holder)
            if holder is not None and seen is not None and seen.is_stopped:
                problem = _holder_stopped(holder.pid)
        if problem is not None or self._holder_stood:
            self._post(ev.HolderLooked(self._generation, problem))
        if problem is not None:
            self._complain(problem.code, f"{problem.message} ({problem.hint})")
        self._holder_stood = problem is not None
        return self._holder_stood

    def _pulse(self) -> int:
        return instances.pulse(self._paths, self._engine.instance_id)

    def _activity(self) -> Activity | None:
        """Return what the engine's process did; None: it is gone, or this one cannot look."""
        try:
            return procfs.activity(self._engine.engine)
        except OSError as exc:
            self._complain(
                "activity", f"the daemon cannot look at the engine's process: {exc.strerror or exc}"
            )
            return None

    def _unheard(self, exc: LlamactlError) -> None:
        """Tell why there was no answer."""
        if exc.code != Code.ENGINE_SOCKET_GONE:
            self._complain(exc.code, exc.message)
        elif self._activity() is not None:
            self._post(ev.SocketGone(self._generation, _socket_gone(exc), datetime.now(UTC)))

    def _complain(self, kind: str, message: str) -> None:
        now = self._now()
        last, logged_at = self._complaints.get(kind, ("", 0.0))
        if message != last or now - logged_at >= COMPLAIN_S:
            log.warning("engine: %s", message)
            self._complaints[kind] = message, now


def _holder_stopped(pid: int) -> Problem:
    return Problem(
        code=Code.HOLDER_STOPPED,
        message=f"the engine's holder (pid {pid}) is stopped from outside: the engine stands still "
        "as soon as it has written more than nobody reads",
        hint=f"kill -CONT {pid}; until then the engine is not replaced, whatever it does",
        details={"holder_pid": pid},
    )


def _socket_gone(exc: LlamactlError) -> Problem:
    return Problem(
        code=Code.ENGINE_SOCKET_GONE,
        message=f"{exc.message}: it serves, but can be neither observed nor reconfigured",
        hint="`llamactl restart --accept-loss` when convenient: nothing that it holds can be kept",
    )


def _problem(wedge: Wedge) -> Problem:
    return Problem(
        code=Code.ENGINE_WEDGED,
        message=f"the engine is wedged: {wedge.why}",
        hint="it is replaced; LLAMACTL_WEDGE_IDLE_S and LLAMACTL_WEDGE_BUSY_S set the limits",
        details=wedge.evidence,
    )
