"""Processes by identity: proven before they are signalled, watched until they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from llamactl_supervisor.procfs import identify

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.models import ProcessIdentity

HOLDER = Path(__file__).with_name("holder.py")
ENDS_S = 1.0
"""From a process's last closed connection to its end: its memory is given back in between."""


class Process:
    """One living process, held by a pidfd: it cannot be mistaken for a later one of that pid."""

    def __init__(self, identity: ProcessIdentity, pidfd: int) -> None:
        self.identity = identity
        self._pidfd = pidfd

    @classmethod
    def open(cls, identity: ProcessIdentity) -> Self | None:
        """Return the process, or None when it is gone. The proof comes after the pidfd is held."""
        try:
            pidfd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return None
        if identify(identity.pid) == identity:
            return cls(identity, pidfd)
        os.close(pidfd)
        return None

    def close(self) -> None:
        """Let go of the process; it lives on."""
        os.close(self._pidfd)

    def send(self, number: signal.Signals) -> None:
        """Signal it. One that has just ended is left alone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def gone_within(self, within_s: float) -> bool:
        """Return whether the process ends within so many seconds."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    async def gone(self) -> None:
        """Return once the process has ended. One waiter at a time."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._pidfd)


def send(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal exactly this process; False when it is gone and nothing was signalled."""
    process = Process.open(identity)
    if process is None:
        return False
    try:
        process.send(number)
    finally:
        process.close()
    return True


async def ends(identity: ProcessIdentity) -> bool:
    """Say whether the process is gone, or goes at once: its connections end before it does."""
    process = Process.open(identity)
    if process is None:
        return True
    try:
        await asyncio.wait_for(process.gone(), ENDS_S)
    except TimeoutError:
        return False
    finally:
        process.close()
    return True


def start_holder(
    order: Mapping[str, Any], within_s: float
) -> tuple[subprocess.Popen[bytes], bytes]:
    """Start a holder; return it and its answer once it has tried to run the engine.

    An empty answer is good or the holder's death (holder.json tells), otherwise it is the errno of
    exec. The caller reaps the holder. Blocks for as long as a fork: call in a thread. Raises
    `TimeoutError` after `within_s`: the holder is dead then, the engine may have been released.
    """
    late = threading.Event()

    def give_up() -> None:
        late.set()
        holder.kill()

    holder = subprocess.Popen(
        [sys.executable, "-I", "-S", str(HOLDER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    patience = threading.Timer(within_s, give_up)
    patience.start()
    with contextlib.suppress(BrokenPipeError), holder.stdin:
        holder.stdin.write(json.dumps(order).encode())
    with holder.stdout:
        answer = holder.stdout.read()
    patience.cancel()
    patience.join()
    if late.is_set():
        holder.wait()
        raise TimeoutError(f"it came no further for {within_s:g} s and was killed")
    return holder, answer
