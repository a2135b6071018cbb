"""Files hold the old conversation or the new one, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import random
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from llamactl_validate.conversations import TEXTS, Later, go_on, hold
from llamactl_validate.expecting import expect, expect_that
from llamactl_validate.scenario import Trial, scenario
from llamactl_validate.workplace import Workplace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llamactl_validate.engine import Engine

NAME, PAGE = "published", "page"
FLIP_SUFFIX = "-flipped"
FULL_REASONS = ("no_space", "files_failed")


@dataclass(frozen=True)
class Talk:
    """A conversation that is kept in files of its own, and how it goes on."""

    name: str
    n_saved: int
    said: list[int]
    control: Later


def _talks(trial: Trial, live: Engine) -> list[Talk]:
    """Save two conversations of different lengths."""
    talks = []
    for name, text in (("short", TEXTS[0]), ("long", TEXTS[1] + TEXTS[2])):

        def undisturbed(text: str = text) -> Later:
            live.erase()
            return go_on(live, 0, hold(live, 0, text))

        control = trial.control(undisturbed)
        live.erase()
        said = hold(live, 0, text)
        n_saved = live.file(0, "save", name).receipt["n_saved"]
        talks.append(Talk(name, n_saved, said, control))
    return talks


def _restored(live: Engine, name: str, talks: list[Talk]) -> Talk:
    """Restore files to slot 0; they have to be one of these conversations, whole."""
    receipt = live.file(0, "restore", name).receipt
    expect("what was lost", receipt["lost"], [])
    whole = {talk.n_saved: talk for talk in talks}
    n_restored = receipt["n_restored"]
    expect_that(f"it has one of {[*whole]} tokens", n_restored in whole, n_restored)
    found = whole[n_restored]
    expect("what goes on with what is restored", go_on(live, 0, found.said), found.control)
    return found


def _publish(live: Engine, talk: Talk) -> None:
    """Write a conversation over what was published, through a page."""
    expect("the status of a restore", live.file(1, "restore", talk.name).status, 200)
    expect("the status of a page-out", live.page(1, "page_out", PAGE).status, 200)
    expect("the status of a spill", live.spill(PAGE, filename=NAME).status, 200)


@scenario(
    "an engine that is killed as it writes leaves the old conversation or the new one",
    n_steps=(300, 1000),
    n_loads=(8, 80),
)
def killed(trial: Trial) -> None:
    """Kill -9, at some moment of a spill; the next engine restores what is there."""
    n_kills = trial.number(4, 40)
    chance = random.Random(41)
    place = Workplace()  # of the files, which outlive each engine
    options = ("--slot-save-path", str(place.slot_files))
    found = {"old": 0, "new": 0}
    try:
        with trial.engine(*options) as live:
            talks = _talks(trial, live)
            old, new = talks
            began = time.monotonic()
            _publish(live, old)
            took_s = time.monotonic() - began
        for n in range(n_kills):
            trial.now(f"kill {n + 1} of {n_kills}")
            with trial.engine(*options) as live, ThreadPoolExecutor(1) as pool:
                # a spill is a part of what was measured, so that some kills come after it
                pool.submit(_publish_until_killed, live, new)
                time.sleep(chance.uniform(0, took_s))
                live.kill()
            with trial.engine(*options) as live:
                there = _restored(live, NAME, talks)
                found["old" if there is old else "new"] += 1
                old, new = there, talks[talks.index(there) - 1]
        for what, n in found.items():
            trial.measure(f"{what} one found", n)
    finally:
        place.close()


def _publish_until_killed(live: Engine, talk: Talk) -> None:
    with contextlib.suppress(httpx.TransportError):
        _publish(live, talk)


@scenario("a file that no longer has room costs nothing of the one before", n_steps=(120, 120))
def no_space(trial: Trial) -> None:
    """The engine's own limit stands for a full disk; nothing is filled."""
    with trial.engine() as live:
        talks = _talks(trial, live)
        old, new = talks
        _publish(live, old)
        expect("the status of a restore", live.file(1, "restore", new.name).status, 200)
        n_bytes = (live.slot_files / NAME).stat().st_size
        trial.now("a full disk")
        with _limited(live.process.pid, n_bytes // 2):
            answer = live.file(1, "save", NAME)
            expect_that("it is refused", answer.status >= 400, answer.body)
            reason = answer.error["reason"]
            expect_that(f"the reason is one of {FULL_REASONS}", reason in FULL_REASONS, reason)
            expect("what is published", _restored(live, NAME, talks).name, old.name)
        trial.now("room again")
        expect("the status of a save", live.file(1, "save", NAME).status, 200)
        expect("what is published", _restored(live, NAME, talks).name, new.name)
        trial.measure("file kept", n_bytes / 2**20, "MiB")


@contextlib.contextmanager
def _limited(pid: int, n_bytes: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@scenario("a flipped bit is found: what is damaged is refused or named", n_steps=(80, 300))
def flipped_bits(trial: Trial) -> None:
    """The slot keeps what it holds, and nothing wrong is ever answered."""
    n_flips = trial.number(16, 200)
    chance = random.Random(43)
    n_refused = 0
    with trial.engine() as live:
        talks = _talks(trial, live)
        short, long = talks
        _publish(live, long)
        files = [path for path in live.slot_files.glob(f"{NAME}*") if path.is_file()]
        damaged = [live.slot_files / path.name.replace(NAME, NAME + FLIP_SUFFIX) for path in files]
        expect_that("there are files", bool(files))
        held = len(hold(live, 0, TEXTS[0])) - 1
        for n in range(n_flips):
            victim = n % len(files)
            trial.now(f"flip {n + 1} of {n_flips}: {files[victim].name}")
            for source, target in zip(files, damaged, strict=True):
                target.write_bytes(source.read_bytes())
            _flip(damaged[victim], chance)
            answer = live.file(0, "restore", NAME + FLIP_SUFFIX)
            if answer.status == 200:
                lost = answer.receipt["lost"]
                expect_that("what is damaged is named", bool(lost), answer.body)
                said = go_on(live, 0, long.said).tokens
                expect("what goes on with what is left", said, long.control.tokens)
                live.erase(0)
                held = len(hold(live, 0, TEXTS[0])) - 1
            else:
                n_refused += 1
                expect("the type of the refusal", answer.error["type"], "page_refused")
                expect("tokens in the slot", live.held(0), held)
        expect("what goes on in the slot", go_on(live, 0, short.said), short.control)
        trial.measure("flips", n_flips)
        trial.measure("refused", n_refused)


def _flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
