"""Signals that end a command which has to end what it has started, and to say what it had."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOLD = {
    128 + number: "interrupted" if number == signal.SIGINT else f"interrupted by {number.name}"
    for number in SIGNALS
}
"""What is said of a command that ends with such a code."""


class Heard:
    """The first signal that came."""

    code = 0
    """What the command ends with; 0: none came."""

    def leave(self) -> None:
        """End the command with the signal's code, where one came."""
        if self.code:
            raise typer.Exit(self.code)


@contextmanager
def interruptible(at_once: Callable[[], None]) -> Iterator[Heard]:
    """Have the first signal call `at_once` and interrupt; those after it change nothing any more.

    What ends on the way out is bounded, so that nobody has to ask twice. A signal that whoever
    started us has us ignore, as nohup does, stays ignored.
    """
    heard = Heard()

    def hear(number: int, _frame: FrameType | None) -> None:
        if not heard.code:
            heard.code = 128 + number
            at_once()
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in ours:
        signal.signal(number, hear)
    try:
        yield heard
    except KeyboardInterrupt:
        heard.leave()
        raise
    finally:
        # Nor may one more signal kill an interpreter that ends: it would tell another code.
        for number in ours:
            signal.signal(number, signal.SIG_IGN if heard.code else before[number])
