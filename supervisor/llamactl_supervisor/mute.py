"""Waiting for what an engine says: as long as it does anything, and not for one that is mute."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from llamactl_supervisor import procfs
from llamactl_supervisor.errors import Code, error
from llamactl_supervisor.progress import worked

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from llamactl_supervisor.models import ProcessIdentity
    from llamactl_supervisor.progress import Activity

MUTE_S = 10.0
"""An engine without work answers at once; one that has done nothing at all for so long is mute."""
LOOK_S = 0.5

_T = TypeVar("_T")


async def answer(question: Coroutine[None, None, _T], engine: ProcessIdentity, what: str) -> _T:
    """Return what the engine answers to the `question`, or raise what that raises.

    Raises `timed_out` once it has used neither processor nor disk for `MUTE_S` seconds. `what`: it
    was asked for. Looks are counted and not time: while this process is stopped there are none.
    """
    asked = asyncio.ensure_future(question)
    mark, looks = _activity(engine), 0
    try:
        while not (await asyncio.wait({asked}, timeout=LOOK_S))[0]:
            looks += 1
            seen = _activity(engine)
            if mark is None or seen is None or worked(mark, seen, looks * LOOK_S):
                mark, looks = seen, 0
            elif looks * LOOK_S >= MUTE_S:
                raise error(
                    Code.TIMED_OUT,
                    f"the engine does not say {what}, and has done nothing else for {MUTE_S:g} s",
                )
        return asked.result()
    finally:
        asked.cancel()


def _activity(engine: ProcessIdentity) -> Activity | None:
    try:
        return procfs.activity(engine)
    except OSError:
        return None
