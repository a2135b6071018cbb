"""Until when the request that is being handled is meant: what nobody waits for is not begun.

A caller that gives up says that it was not done. So its request has an end, on a clock that both
read: caller and daemon on the unix socket are on one machine. It also ends with its connection.
"""

from __future__ import annotations

import math
import time
from contextvars import ContextVar

from llamactl_supervisor.errors import Code, LlamactlError, error

EXPIRES = "Llamactl-Expires"
"""Header: seconds on the clock of the boot (CLOCK_BOOTTIME), after which a change is not begun."""
MARGIN_S = 1.0
"""A caller waits so much longer than its request is good for: what began in time is answered."""

expires_at: ContextVar[float] = ContextVar("expires_at", default=math.inf)
"""When the request that is being handled expires; unless it says so: never."""


def until(timeout_s: float) -> dict[str, str]:
    """Return the header of a request whose caller waits for `timeout_s` seconds."""
    return {EXPIRES: f"{_now() + max(0.0, timeout_s - MARGIN_S):.3f}"}


def parse(text: str) -> float:
    """Return the moment that the header says; raises `invalid_request`."""
    try:
        at = float(text)
    except ValueError:
        at = math.nan
    if math.isnan(at):
        message = f"{EXPIRES}: must be seconds on the clock of the boot, not {text[:40]!r}"
        raise error(Code.INVALID_REQUEST, message)
    return at


def expired(at: float) -> LlamactlError | None:
    """Return why what was good until `at` is not begun any more; None while it is."""
    return abandoned() if _now() >= at else None


def abandoned() -> LlamactlError:
    """Return the error of a request for whose answer nobody waits any more."""
    return error(
        Code.REQUEST_EXPIRED,
        "whoever asked for it has given it up meanwhile: nothing was done",
        hint="ask again",
    )


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
