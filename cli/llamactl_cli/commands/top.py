"""`llamactl top`: the status, drawn again each second, with tokens per second."""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from llamactl_supervisor.errors import DaemonUnreachableError, ExitCode, LlamactlError

from llamactl_cli import text
from llamactl_cli.commands.status import SERVING, StatusView, view_of
from llamactl_cli.connect import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llamactl_supervisor.client import Client
    from llamactl_supervisor.models import EngineLook

    from llamactl_cli.output import Output

PERIOD_S = 1.0


@dataclass(frozen=True)
class Frame:
    """One status with what it has in tokens per second."""

    view: StatusView

    def text(self) -> str:
        """Return the sum above the status."""
        rates = self.view.rates
        busy = f"{sum(rates.values()):.1f} tok/s" if rates else "-"
        return f"{time.strftime('%H:%M:%S')}  {busy} in all slots\n\n{self.view.text()}"

    def data(self) -> dict[str, Any]:
        """Return the status with the rates by slot."""
        return self.view.data() | {"tokens_per_s": dict(self.view.rates)}


class Sampler:
    """Compares what each slot holds with what it held before."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._at_s = 0.0

    def rates(self, look: EngineLook | None, now_s: float) -> dict[int, float]:
        """Return tokens per second by slot since the last call, read or written.

        A slot that holds less than before began another conversation: it has none this time.
        """
        slots = () if look is None or look.slots is None else look.slots
        held = {slot.id: slot.n_prompt_tokens or 0 for slot in slots if not slot.parked}
        before, passed_s = self._held, now_s - self._at_s
        self._held, self._at_s = held, now_s
        grown = {slot: count - before[slot] for slot, count in held.items() if slot in before}
        return {slot: round(more / passed_s, 1) for slot, more in grown.items() if more >= 0}


def top(
    ctx: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="One frame, over one second; so without a terminal.")
    ] = False,
) -> None:
    """Watch slots, pages, memory and tokens per second.

    `q` or Ctrl-C ends it. A daemon that is lost is waited for. A sleeping engine sleeps on.
    """
    output: Output = ctx.obj
    with connect(output) as client:
        if once or output.as_json or not _is_screen():
            sampler = Sampler()
            _frame(client, sampler)
            time.sleep(PERIOD_S)
            frame = _frame(client, sampler)
            output.emit(frame)
            if frame.view.status.state not in SERVING:
                raise typer.Exit(ExitCode.NOT_RUNNING)
        else:
            _watch(client)


def _watch(client: Client) -> None:
    from rich.live import Live
    from rich.text import Text

    sampler = Sampler()
    try:
        with _keys() as asked_to_end, Live(screen=True, auto_refresh=False) as screen:
            while True:
                drawn = f"{text.shown(_shown(client, sampler))}\n\nq ends"
                screen.update(Text(drawn, no_wrap=True, overflow="crop"), refresh=True)
                if asked_to_end(PERIOD_S):
                    return
    except KeyboardInterrupt:
        return


def _shown(client: Client, sampler: Sampler) -> str:
    try:
        return _frame(client, sampler).text()
    except DaemonUnreachableError as exc:
        rows = [("daemon", "lost; trying again"), ("", exc.message), ("", exc.hint)]
    except LlamactlError as exc:
        rows = [("problem", exc.message), ("", exc.hint)]
    return text.screen(rows)


def _frame(client: Client, sampler: Sampler) -> Frame:
    view = view_of(client, client.status())
    return Frame(replace(view, rates=sampler.rates(view.look, time.monotonic())))


def _is_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield what waits so many seconds for a `q`, without an Enter where there is a keyboard."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield _sleep
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def asked(wait_s: float) -> bool:
        ready, _, _ = select.select([keyboard], [], [], wait_s)
        # Nothing to be read from what is ready: the terminal is gone.
        return bool(ready) and os.read(keyboard, 64).lower() in {b"", b"q"}

    try:
        tty.setcbreak(keyboard)
        yield asked
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _sleep(wait_s: float) -> bool:
    time.sleep(wait_s)
    return False
