"""The clock of all that is waited for: it stands still while this process does not run."""

from __future__ import annotations

import asyncio
import time

TICK_S = 0.2
"""Pause between two looks at the time; a longer one means that nobody let us look."""
LATE_S = 0.5
"""A look that comes later than this counts for one tick: the rest was not ours, and an engine that
was stopped, frozen or suspended together with us did not run either."""


class Clock:
    """Monotonic seconds, without those in which this process was stopped or starved."""

    def __init__(self) -> None:
        self._seen = time.monotonic()
        self._lost_s = 0.0

    def now(self) -> float:
        """Return the time; never less than before, and never ahead of the monotonic clock."""
        at = time.monotonic()
        gap_s, self._seen = at - self._seen, at
        if gap_s > LATE_S:
            self._lost_s += gap_s - TICK_S
        return at - self._lost_s

    async def run(self) -> None:
        """Look at the time for ever, so that a gap is known for what it is."""
        while True:
            self.now()
            await asyncio.sleep(TICK_S)
