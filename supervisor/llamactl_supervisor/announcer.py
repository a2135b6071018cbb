"""What the service manager gets to know of the engine: when it is told, and in which words."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from llamactl_supervisor.models import EngineState
from llamactl_supervisor.notify import USEC_PER_S

if TYPE_CHECKING:
    from llamactl_supervisor.models import Problem
    from llamactl_supervisor.notify import Notifier
    from llamactl_supervisor.snapshot import Snapshot

EXTEND_EVERY_S = 1.0
EXTEND_S = 10.0
"""How much longer a start, a reload or a stop that goes on may take, each time it is said."""
ON_THE_WAY = frozenset({EngineState.STARTING, EngineState.STOPPING, EngineState.CRASHED})
"""States that lead to another by themselves: ready is not said yet."""
STATUS_CHARS_MAX = 300


class Announcer:
    """Follows the snapshot and says what changed.

    Ready is said once, when the engine serves, when none is wanted, or when it was given up: the
    daemon then waits for a person, who must find it there.
    """

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._ready = self._stopping = self._extends = False
        self._status = ""

    def follow(self, snapshot: Snapshot, unreachable: Problem | None = None) -> None:
        """Say what is new in `snapshot`, and why no client comes through, if none does."""
        lines: list[str] = []
        given_up = snapshot.state is EngineState.FAILED and snapshot.settings.on_failed == "exit"
        ready = self._ready or not (given_up or snapshot.state in ON_THE_WAY)
        stopping = self._stopping or snapshot.closing or snapshot.leaving
        if stopping and not self._stopping:
            lines.append("STOPPING=1")
        elif ready and not self._ready and not stopping:
            lines.append("READY=1")
        status = status_text(snapshot)
        if unreachable is not None:
            status = f"{unreachable.message}; {status}"[:STATUS_CHARS_MAX]
        if status != self._status:
            lines.append(f"STATUS={status}")
        # Bounded by the daemon's own patience: what has no deadline is not waited for either. A
        # reload waits as long as whoever asked for it: a long prompt delays its safe point.
        on_the_way = snapshot.state in ON_THE_WAY and snapshot.deadline is not None
        reloading = snapshot.reloading is not None
        self._extends = reloading or ((stopping or not ready) and on_the_way)
        if not lines or self._notifier.send(*lines):
            self._ready, self._stopping, self._status = ready, stopping, status

    async def keep_alive(self) -> None:
        """Give the signs of life that are asked for, from the loop that gives them, for ever."""
        if not self._notifier:
            return
        async with asyncio.TaskGroup() as signs:
            signs.create_task(self._extend())
            if self._notifier.watchdog_s is not None:
                signs.create_task(self._tick(self._notifier.watchdog_s / 2))

    async def _tick(self, period_s: float) -> None:
        while True:
            self._notifier.send("WATCHDOG=1")
            await asyncio.sleep(period_s)

    async def _extend(self) -> None:
        while True:
            if self._extends:
                self._notifier.send(f"EXTEND_TIMEOUT_USEC={EXTEND_S * USEC_PER_S:.0f}")
            await asyncio.sleep(EXTEND_EVERY_S)

    def reloading(self) -> None:
        """Say that the configuration is read again."""
        if not self._ready:
            return
        self._notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self, snapshot: Snapshot, refused: str | None) -> None:
        """Say that the reload is over; `refused` is why nothing changed, and stays to be read."""
        if not self._ready or self._stopping:
            return
        self._status = text = status_text(snapshot)
        if refused is not None:
            text = f"{text}; reload refused: {refused}"[:STATUS_CHARS_MAX]
        self._notifier.send("READY=1", f"STATUS={text}")


def status_text(snapshot: Snapshot) -> str:
    """Return one line: the state, then the geometry and the pid, or what went wrong."""
    facts: list[str] = []
    if snapshot.carry is not None:
        facts.append(snapshot.carry.progress)
    if snapshot.problem is not None:
        facts.append(snapshot.problem.message)
    if (geometry := snapshot.facts.geometry) is not None:
        facts.append(f"{geometry.n_ctx} tokens over {geometry.n_seq} slots")
    if snapshot.process is not None:
        facts.append(f"engine pid {snapshot.process.engine.pid}")
    if snapshot.leaving:
        facts.append("handed over to the next daemon")
    text = f"{snapshot.state}: {', '.join(facts)}" if facts else str(snapshot.state)
    return text[:STATUS_CHARS_MAX]
