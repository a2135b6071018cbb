"""How long an engine's answer is waited for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import mute, procfs
from llamactl_supervisor.errors import LlamactlError
from sandbox import WITHIN_S

if TYPE_CHECKING:
    from collections.abc import Coroutine


def asked(question: Coroutine[None, None, str], program: str) -> str:
    """Return what is answered while this program is the engine that is watched."""
    engine = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert engine.stdout is not None
        engine.stdout.readline()
        identity = procfs.identify(engine.pid)
        assert identity is not None
        return asyncio.run(asyncio.wait_for(mute.answer(question, identity, "it"), WITHIN_S))
    finally:
        engine.kill()
        engine.communicate()


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "so"


async def fails() -> str:
    raise KeyError("what it raises")


IDLE = "import time; print(flush=True); time.sleep(600)"
BUSY = "print(flush=True)\nwhile True: pass"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mute, "MUTE_S", 1.0)
    monkeypatch.setattr(mute, "LOOK_S", 0.5)


def test_one_that_does_nothing_is_given_up() -> None:
    with pytest.raises(LlamactlError) as caught:
        asked(after(600.0), IDLE)
    assert caught.value.code == "timed_out"
    assert caught.value.message == "the engine does not say it, and has done nothing else for 1 s"


def test_one_that_works_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mute, "MUTE_S", 5.0)  # so long that it gets its part of a busy machine
    assert asked(after(8.0), BUSY) == "so"


def test_what_is_answered_and_what_is_raised_is_passed_on() -> None:
    assert asked(after(0.0), IDLE) == "so"
    with pytest.raises(KeyError):
        asked(fails(), IDLE)
