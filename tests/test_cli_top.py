"""`llamactl top`: one frame without a terminal, and on one until q."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import subprocess
import termios
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest
from cli_home import COMMAND, Home, fresh_home
from llamactl_cli.commands.top import Sampler
from llamactl_supervisor.models import EngineLook, SlotState

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS = 80


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


def look_of(*held: int) -> EngineLook:
    slots = tuple(
        SlotState(id=number, n_ctx=8192, n_prompt_tokens=count) for number, count in enumerate(held)
    )
    parked = SlotState(id=0, n_ctx=8192, n_prompt_tokens=9, parked=True, page="parked-0")
    return EngineLook(asleep=False, slots=(*slots, parked), pages=())


def test_rates_are_what_the_slots_grew_by() -> None:
    sampler = Sampler()
    assert sampler.rates(look_of(40, 41), 10.0) == {}
    assert sampler.rates(look_of(70, 41), 12.0) == {0: 15.0, 1: 0.0}
    assert sampler.rates(look_of(5, 43, 60), 13.0) == {1: 2.0}
    assert sampler.rates(None, 14.0) == {}
    assert sampler.rates(look_of(5), 15.0) == {}


def test_top_without_a_terminal_is_one_frame(home: Home) -> None:
    home.up()
    ran = home.run("top")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[0].endswith("  0.0 tok/s in all slots")
    assert ran.rows["slot 0"] == "[#...................]  40 of 8192 tokens, 0.0 tok/s"
    assert "\x1b" not in ran.out
    seen = home.run("top", "--once", "--json").result
    assert seen["tokens_per_s"] == {"0": 0.0, "1": 0.0}
    home.run("stop")
    assert home.run("top").code == 3


def test_top_on_a_terminal_outlives_the_daemon_and_ends_with_q(home: Home) -> None:
    up = home.up()
    with on_terminal("top") as (child, terminal):
        read_until(terminal, b"[#...................]  40 of 8192 tokens, 0.0 tok/s")
        daemon = psutil.Process(up["daemon_pid"])
        daemon.kill()
        daemon.wait(10)
        read_until(terminal, b"lost; trying again")
        assert home.up()["pid"] == up["pid"]
        read_until(terminal, b"40 of 8192 tokens")
        os.write(terminal, b"q")
        read_until(terminal, b"\x1b[?1049l")
        assert child.wait(20) == 0


def test_an_interrupt_ends_top_and_gives_the_terminal_back(home: Home) -> None:
    home.up()
    with on_terminal("top") as (child, terminal):
        read_until(terminal, b"slot 0")
        os.write(terminal, b"\x03")
        read_until(terminal, b"\x1b[?1049l")
        assert child.wait(20) == 0
        after = termios.tcgetattr(terminal)
    assert after[3] & termios.ECHO
    assert after[3] & termios.ICANON


@contextlib.contextmanager
def on_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a command on a terminal of 80 columns of its own; yield it and the terminal's end."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, COLUMNS))
    child = subprocess.Popen(
        [*COMMAND, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "NO_COLOR": "1"},
        preexec_fn=partial(own_terminal, theirs),
    )
    try:
        yield child, ours
    finally:
        child.kill()
        child.wait()
        os.close(theirs)
        os.close(ours)


def own_terminal(terminal: int) -> None:
    """In the child: be the foreground of the terminal, so that Ctrl-C arrives as a signal."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def read_until(terminal: int, wanted: bytes) -> bytes:
    """Read what is drawn until `wanted` is part of it."""
    seen = b""
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, f"{wanted!r} is not in {seen[-2000:]!r}"
        seen += os.read(terminal, 65536)
    return seen
