"""The daemon, as far as a run looks after it: whether it answers, and which process it is."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_cli.run.link import DeclinedError, SilentError, UnreachableError, ask

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamactl_cli.run.places import Places

LOOK_S = 1.0
"""Pause between two looks at a daemon that has not given us an engine yet."""
SILENT_S = 3.0
"""So long it may take over the least of answers before that is said."""
GIVE_UP_S = 30.0
"""So long it may take altogether."""


async def answers(places: Places, within_s: float) -> bool:
    """Whether a daemon answers. Raises `SilentError` where one is there that does not."""
    try:
        await ask(places.control_socket, "/livez", within_s)
    except SilentError:
        raise
    except UnreachableError:
        return False
    except DeclinedError:
        pass  # that is an answer
    return True


async def watch(places: Places, awaited: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Look after the daemon while something is awaited of it. Raises `SilentError`.

    One that is not there is no matter: whoever needs it starts one.
    """
    await asyncio.sleep(LOOK_S)
    while awaited():
        try:
            await answers(places, SILENT_S)
        except SilentError:
            say(f"{silence(places)}; it is waited for, {GIVE_UP_S - SILENT_S:g} s at most")
            try:
                await answers(places, GIVE_UP_S - SILENT_S)
            except SilentError as exc:
                raise SilentError(silence(places)) from exc
        await asyncio.sleep(LOOK_S)


def silence(places: Places) -> str:
    """Return what is known of a daemon that does not answer, and how to go on."""
    pid = _pid(places)
    if pid is None:
        return f"the daemon behind {places.control_socket} does not answer"
    if _is_stopped(pid):
        return f"the daemon (pid {pid}) is stopped and does not answer: kill -CONT {pid}"
    return f"the daemon (pid {pid}) does not answer: after kill -KILL {pid} another takes its place"


def _pid(places: Places) -> int | None:
    """Return the process that its lock names, if there is such a one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid = int((places.runtime / "daemon.lock").read_text().split()[0])
        if Path(f"/proc/{pid}").exists():
            return pid
    return None


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[:1] == [b"T"]
