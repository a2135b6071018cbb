"""A generation goes on across changes of the geometry as if there had been none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_validate.conversations import (
    GREEDY,
    MORE,
    N_LATER,
    NUMBERS,
    SAMPLED,
    TEXTS,
    Later,
    ask,
    hold,
    tokens_of,
)
from llamactl_validate.engine import N_CTX, TRIES, Generation
from llamactl_validate.expecting import Failed, Skipped, expect, expect_that
from llamactl_validate.scenario import scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from llamactl_validate.asked import Json
    from llamactl_validate.engine import Engine
    from llamactl_validate.scenario import Trial

    Launch = Callable[[], AbstractContextManager[Engine]]

FIRST = {"n_ctx": 2 * N_CTX, "n_seq": 4}
GROW = {"n_ctx": 8 * N_CTX, "n_seq": 8}
SHRINK = {"n_ctx": N_CTX, "n_seq": 4}
OTHER = {"n_ctx": 6 * N_CTX, "n_seq": 6}
ONE = {"n_ctx": 2 * N_CTX, "n_seq": 1}
COURSES = ((SHRINK,), (GROW, FIRST), (OTHER, SHRINK))
"""Each ends with as many slots as before; two changes may undo what one of them does wrong."""
LAYOUTS: tuple[Json, ...] = ({"kv_unified": True}, {"kv_unified": False})
N_TURNS = 3
NO_CHECKPOINTS = "this model needs no checkpoints: its memory can be cut at any token"


@dataclass(frozen=True)
class Course:
    """What is asked for each text, and the changes meanwhile."""

    texts: Sequence[str]
    asked: Json
    changes: Sequence[Json]


@dataclass(frozen=True, eq=False)
class Run:
    """What an engine wrote, and what it made of its conversations afterwards.

    Runs are equal where that is, however long they took.
    """

    generation: Generation
    continued: tuple[Later, ...]
    edited: tuple[Later, ...]

    @property
    def written(self) -> tuple[object, ...]:
        """All that a change must not alter."""
        return self.generation.written, self.continued, self.edited

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.written == other.written

    def __hash__(self) -> int:
        return hash(self.written)


def converse(live: Engine, course: Course, changes: Sequence[Json]) -> Run:
    """Generate with these changes in the middle; go on with each conversation, then edit it."""
    prompts = [tokens_of(live, text) for text in course.texts]
    generation = live.generate(course.asked | {"prompt": prompts}, changes)
    more = tokens_of(live, MORE)

    def later(prompt: Sequence[int], slot: int) -> Later:
        return ask(live, slot, prompt, course.asked, N_LATER)

    conversations = list(zip(prompts, generation.tokens, generation.slots, strict=True))
    continued = tuple(later([*told, *wrote, *more], slot) for told, wrote, slot in conversations)
    edited = tuple(later([*told[:-10], *more, *more], slot) for told, _, slot in conversations)
    expect("how often the weights were loaded", live.props()["n_weight_loads"], 1)
    return Run(generation, continued, edited)


def undisturbed(launch: Launch, course: Course) -> Run:
    """Return a run without a change."""
    with launch() as live:
        return converse(live, course, ())


def disturbed(launch: Launch, course: Course) -> Run:
    """Return a run in which every change came while every prompt was being answered."""
    for _ in range(TRIES):
        with launch() as live:
            run = converse(live, course, course.changes)
        if run.generation.changed_in_time:
            for receipt, change in zip(run.generation.receipts, course.changes, strict=True):
                geometry = receipt["geometry"]
                expect("the geometry that was asked for", geometry, geometry | change)
                fates = [slot["fate"] for slot in receipt["slots"]]
                expect("what became of the slots", fates, ["resident"] * len(course.texts))
            return run
    raise Failed(f"no change came in time: {run.generation.receipts}")


def compare(control: Run, changed: Run) -> None:
    """Raise what a change has altered."""
    one, other = control.generation, changed.generation
    for what in ("texts", "tokens", "logprobs", "slots", "draft_counts"):
        expect(f"{what} of the generations", getattr(other, what), getattr(one, what))
    expect("what went on with the conversations", changed.continued, control.continued)
    expect("what edits the conversations", changed.edited, control.edited)


def slots_for(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the options of as many slots: then each run gives a text the same one."""
    return ("--parallel", str(len(texts)), "--ctx-size", str(2 * N_CTX))


def states_alike(trial: Trial) -> None:
    """Hold conversations while the geometry changes; their states have to be the same bytes.

    A state says how many slots there are, so it is looked at where they are as many as before.
    """
    with trial.engine(*slots_for(TEXTS)) as live:
        for slot, text in enumerate(TEXTS):
            hold(live, slot, text)
        before = [live.saved_state(slot) for slot in range(len(TEXTS))]
        for changes in COURSES:
            trial.now(f"a change to {' and then to '.join(map(str, changes))}")
            for change in changes:
                live.applied(**change)
            for slot, state in enumerate(before):
                same = live.saved_state(slot) == state
                expect_that(f"the {len(state)} bytes of slot {slot}'s state are the same", same)
    trial.measure("bytes compared", sum(map(len, before)))


def _prove(trial: Trial, asked: Json, texts: Sequence[str], changes: Sequence[Json]) -> Run:
    course = Course(texts, asked, changes)

    def launch() -> AbstractContextManager[Engine]:
        return trial.engine(*slots_for(texts))

    control = trial.control(lambda: undisturbed(launch, course))
    trial.now("the run with changes")
    changed = disturbed(launch, course)
    compare(control, changed)
    pauses_ms = [receipt["pause_ms"] for receipt in changed.generation.receipts]
    trial.measure("tokens compared", sum(map(len, changed.generation.tokens)))
    trial.measure("changes", len(pauses_ms))
    trial.measure("longest pause", max(pauses_ms), "ms")
    return changed


@scenario(
    "four generations go on across a grow and a shrink, and every bit of their logits is the same",
    n_steps=(600, 600),
    instead=states_alike,
)
def greedy(trial: Trial) -> None:
    """Greedy, with the log probability of each token."""
    _prove(trial, GREEDY, TEXTS, (GROW, SHRINK, OTHER))


@scenario(
    "four seeded generations draw the same tokens across a grow and a shrink",
    n_steps=(600, 600),
    instead=states_alike,
)
def sampled(trial: Trial) -> None:
    """A sampler has a state of its own, and another seed has to show in the answer."""
    changed = _prove(trial, SAMPLED, TEXTS, (GROW, SHRINK))
    trial.now("another seed")
    with trial.engine(*slots_for(TEXTS)) as live:
        prompts = [tokens_of(live, text) for text in TEXTS]
        other = live.generate(SAMPLED | {"seed": 8, "n_predict": 16, "prompt": prompts})
    same = [tokens[:16] for tokens in changed.generation.tokens]
    expect_that("another seed draws other tokens", [*other.tokens] != same)


@scenario(
    "a grammar holds across a grow and a shrink",
    n_steps=(500, 500),
    instead=states_alike,
)
def grammar(trial: Trial) -> None:
    """Numbers as a schema wants them; half of them are written after the changes."""
    asked = SAMPLED | {"n_predict": 80, "ignore_eos": False, "json_schema": NUMBERS}
    changed = _prove(trial, asked, TEXTS[:2], (GROW, SHRINK))
    for text in changed.generation.texts:
        numbers = json.loads(text)
        expect("how many numbers there are", len(numbers), NUMBERS["minItems"])
        expect_that("each is between 100 and 999", all(100 <= n <= 999 for n in numbers), text)


@scenario(
    "two generations go on between unified and separate caches",
    n_steps=(450, 450),
    instead=states_alike,
)
def layouts(trial: Trial) -> None:
    """The layouts round differently, so the words are compared and not the bits."""
    _prove(trial, GREEDY | {"n_probs": 0}, TEXTS[:2], 2 * LAYOUTS)


@scenario("the bytes of four states are the same after every change", n_steps=(80, 80))
def states(trial: Trial) -> None:
    """Also where the machine computes the same thing differently each time."""
    states_alike(trial)


def rolled_back(live: Engine, changes: Sequence[Json]) -> tuple[float, list[Later]]:
    """Have conversations of some turns and edit each turn, the last one first, after the changes.

    Return the bytes of the checkpoints that were there, and what came of the edits.
    """
    live.erase()
    more = tokens_of(live, MORE)
    turns = []
    for slot, text in enumerate(TEXTS[:2]):
        said = tokens_of(live, text)
        for _ in range(N_TURNS):
            turns.append((slot, said))
            said = [*said, *ask(live, slot, said, GREEDY, N_LATER).tokens, *more]
    for change in changes:
        live.applied(**change)
    n_bytes = live.metric("ctx_checkpoint_bytes")
    edited = [ask(live, slot, [*said, *more, *more], GREEDY, N_LATER) for slot, said in turns[::-1]]
    return n_bytes, edited


@scenario(
    "a conversation is edited at each of its turns as if nothing had been changed",
    n_steps=(300, 300),
    instead=states_alike,
)
def checkpoints(trial: Trial) -> None:
    """A memory that is recurrent, or has a sliding window, cannot be cut: it is rolled back."""
    with trial.engine(*slots_for(TEXTS)) as live:
        hold(live, 0, TEXTS[0], n_predict=1)
        if live.metric("ctx_checkpoint_bytes") == 0:
            raise Skipped(NO_CHECKPOINTS)
        n_bytes, edited = trial.control(lambda: rolled_back(live, ()))
        trial.now("two conversations are moved, parked and placed")
        found_bytes, found = rolled_back(live, (GROW, ONE, SHRINK))
        expect("bytes of their checkpoints", found_bytes, n_bytes)
        expect("what edits their turns, the last one first", found, edited)
        trial.measure("checkpoints", n_bytes / 2**20, "MiB")
        trial.measure("turns edited", len(edited))
