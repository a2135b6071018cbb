"""What a row of observations comes to: who works is left alone, who gets nowhere is found."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamactl_supervisor.config import Settings
from llamactl_supervisor.progress import (
    ANSWER_S,
    OBSERVATIONS_MIN,
    Activity,
    Answer,
    Observation,
    Progress,
    observe,
)

if TYPE_CHECKING:
    from llamactl_supervisor.progress import Wedge

SETTINGS = Settings(probe_s=2, wedge_idle_s=30, wedge_busy_s=600, ready_stall_s=300)
IDLE = Answer(n_ubatches=5, is_working=False, is_sleeping=False)
WORKING = replace(IDLE, is_working=True)
WAKING = replace(WORKING, is_sleeping=True)


@dataclass
class Watch:
    """An engine as it is observed, every `probe_s` unless a test says otherwise."""

    progress: Progress = field(default_factory=Progress)
    at: float = 1000.0
    cpu_s: float = 50.0
    disk_bytes: int = 0
    pulse: int = 1

    def see(
        self,
        answer: Answer | None,
        *,
        after_s: float = 2.0,
        cpu_share: float = 0.0,
        is_stopped: bool = False,
    ) -> Wedge | None:
        self.at += after_s
        self.cpu_s += cpu_share * after_s
        activity = Activity(self.cpu_s, self.disk_bytes, is_stopped=is_stopped)
        seen = Observation(self.at, answer, activity, self.pulse)
        self.progress = observe(self.progress, seen, SETTINGS)
        return self.progress.wedge

    def see_until_wedged(
        self,
        answer: Answer | None,
        *,
        within_s: float,
        cpu_share: float = 0.0,
        is_stopped: bool = False,
    ) -> tuple[Wedge | None, float]:
        """Return the wedge, or None, and how long it took to be seen."""
        began = self.at
        while self.at - began < within_s:
            if wedge := self.see(answer, cpu_share=cpu_share, is_stopped=is_stopped):
                return wedge, self.at - began
        return None, within_s


@pytest.fixture
def watch() -> Watch:
    watch = Watch()
    assert watch.see(IDLE) is None
    return watch


def test_an_idle_engine_is_healthy_for_ever(watch: Watch) -> None:
    assert watch.see_until_wedged(IDLE, within_s=10_000) == (None, 10_000)
    asleep = replace(IDLE, is_sleeping=True)
    assert watch.see_until_wedged(asleep, within_s=10_000) == (None, 10_000)


def test_an_engine_that_computes_is_healthy_though_the_machine_gives_it_no_time(
    watch: Watch,
) -> None:
    for number in range(1000):
        assert watch.see(replace(WORKING, n_ubatches=6 + number)) is None


def test_a_deadlock_is_found_after_the_short_limit(watch: Watch) -> None:
    wedge, after_s = watch.see_until_wedged(WORKING, within_s=100)
    assert wedge is not None
    assert 30 <= after_s <= 36
    assert wedge.why == "it works on a request, and has used no processor and no disk for 30 s"
    assert wedge.evidence == {
        "answers": True,
        "is_stopped": False,
        "is_waking": False,
        "n_ubatches": 5,
        "still_s": 30.0,
        "idle_s": 30.0,
        "limit_s": 30.0,
        "longest_ubatch_s": 0.0,
        "observations": 16,
        "cpu_s": 50.0,
    }


def test_answering_our_questions_is_no_work(watch: Watch) -> None:
    """5 ms for each of them: a deadlock is still one."""
    wedge, after_s = watch.see_until_wedged(WORKING, within_s=100, cpu_share=0.0025)
    assert wedge is not None
    assert after_s <= 36


def test_a_micro_batch_of_minutes_is_not_wedged_and_a_livelock_is(watch: Watch) -> None:
    assert watch.see_until_wedged(WORKING, within_s=590, cpu_share=2.0)[0] is None
    wedge, after_s = watch.see_until_wedged(WORKING, within_s=100, cpu_share=2.0)
    assert wedge is not None
    assert after_s <= 20
    assert wedge.why == "it works on a request, and has come no further for 600 s"


def test_a_first_micro_batch_is_judged_by_the_processor_that_it_was_given(watch: Watch) -> None:
    """A starved machine takes long over it; once one has ended it is known how long."""
    wedge, after_s = watch.see_until_wedged(WORKING, within_s=20_000, cpu_share=0.1)
    assert wedge is not None
    assert 6000 <= after_s <= 6006
    watch.progress = Progress()
    watch.see(IDLE)
    wedge, after_s = watch.see_until_wedged(WORKING, within_s=20_000, cpu_share=0.03)
    assert wedge is not None
    assert 12_000 <= after_s <= 12_006, "but not for ever"


def test_a_deadlock_in_the_middle_of_a_long_micro_batch_is_found_as_soon(watch: Watch) -> None:
    assert watch.see_until_wedged(WORKING, within_s=300, cpu_share=2.0)[0] is None
    wedge, after_s = watch.see_until_wedged(WORKING, within_s=100)
    assert wedge is not None
    assert 30 <= after_s <= 36


def test_a_process_that_gets_a_twentieth_of_a_core_works(watch: Watch) -> None:
    assert watch.see_until_wedged(WORKING, within_s=590, cpu_share=0.05)[0] is None


def test_a_process_that_waits_for_its_disk_works(watch: Watch) -> None:
    for _ in range(200):
        watch.disk_bytes += 4096
        assert watch.see(WORKING) is None


def test_the_longest_micro_batch_stretches_the_long_limit(watch: Watch) -> None:
    """100 s for one have been seen, so that 20 times as many are waited for."""
    assert watch.see_until_wedged(WORKING, within_s=100, cpu_share=1.0)[0] is None
    watch.see(replace(WORKING, n_ubatches=6), cpu_share=1.0)
    assert 98 <= watch.progress.ubatch_s <= 102
    same = replace(WORKING, n_ubatches=6)
    wedge, after_s = watch.see_until_wedged(same, within_s=5000, cpu_share=1.0)
    assert wedge is not None
    assert 20 * 98 <= after_s <= 20 * 102 + 6


@pytest.mark.parametrize(("cpu_share", "limit_s"), [(0.0, 30), (1.0, 600)])
def test_an_engine_that_answers_nothing_is_found(
    watch: Watch, cpu_share: float, limit_s: float
) -> None:
    wedge, after_s = watch.see_until_wedged(None, within_s=1000, cpu_share=cpu_share)
    assert wedge is not None
    assert limit_s <= after_s <= limit_s + 6
    assert wedge.why.startswith("it answers no question")
    assert wedge.evidence["answers"] is False


def test_one_answer_is_enough_of_a_sign_of_life(watch: Watch) -> None:
    for _ in range(100):
        assert watch.see_until_wedged(None, within_s=28)[0] is None
        assert watch.see(IDLE) is None


def test_a_stopped_engine_is_named_as_what_it_is(watch: Watch) -> None:
    wedge, after_s = watch.see_until_wedged(None, within_s=100, is_stopped=True)
    assert wedge is not None
    assert after_s <= 36
    assert wedge.why.startswith("it is stopped from outside (a signal or a debugger)")


def test_an_engine_of_an_older_build_is_judged_by_its_answers_alone(watch: Watch) -> None:
    assert watch.see_until_wedged(Answer(), within_s=10_000)[0] is None
    assert watch.see_until_wedged(None, within_s=100)[0] is not None


def test_a_wake_is_judged_like_a_load(watch: Watch) -> None:
    """No limit while the process or its log moves, the one of a load when neither does."""
    assert watch.see_until_wedged(WAKING, within_s=5000, cpu_share=0.5)[0] is None
    for _ in range(1000):
        watch.pulse += 1
        assert watch.see(WAKING) is None
    wedge, after_s = watch.see_until_wedged(WAKING, within_s=1000)
    assert wedge is not None
    assert 300 <= after_s <= 306
    assert wedge.why.startswith("it loads its weights after a sleep")


def test_a_wake_is_no_micro_batch(watch: Watch) -> None:
    assert watch.see_until_wedged(WAKING, within_s=200, cpu_share=1.0)[0] is None
    assert watch.see(replace(WORKING, n_ubatches=7)) is None
    assert watch.progress.ubatch_s <= 2.0


@pytest.mark.parametrize("answer", [WORKING, None])
def test_a_daemon_that_was_stopped_itself_condemns_nobody(
    watch: Watch, answer: Answer | None
) -> None:
    """Hours between two looks count as one regular gap: it takes as many looks as ever."""
    for _ in range(30 // (2 + int(ANSWER_S))):
        assert watch.see(answer, after_s=7200.0) is None
    assert watch.see(IDLE, after_s=7200.0) is None
    assert watch.progress.standstill is None


def test_no_limit_is_so_short_that_one_look_would_do() -> None:
    short = SETTINGS.model_copy(update={"wedge_idle_s": 0.001})
    progress, looks = Progress(), 0
    while progress.wedge is None:
        looks += 1
        seen = Observation(float(looks), None, Activity(1.0))
        progress = observe(progress, seen, short)
    assert looks == OBSERVATIONS_MIN


steps = st.tuples(
    st.sampled_from([IDLE, WORKING, WAKING, Answer(), None]),
    st.floats(0.1, 10_000),
    st.floats(0, 4),
    st.booleans(),
)


@given(st.lists(steps, max_size=60))
def test_who_is_condemned_has_stood_still_in_every_look(
    rows: list[tuple[Answer | None, float, float, bool]],
) -> None:
    watch, still_looks, counted_s, n_ubatches = Watch(), 0, 0.0, 5
    for answer, after_s, cpu_share, moves in rows:
        if answer is not None and answer.n_ubatches is not None:
            n_ubatches += moves
            answer = replace(answer, n_ubatches=n_ubatches)
        healthy = answer is not None and (not answer.is_working or moves)
        still_looks = 0 if healthy else still_looks + 1
        counted_s = 0.0 if healthy else counted_s + min(after_s, 2 + ANSWER_S)
        if watch.see(answer, after_s=after_s, cpu_share=cpu_share) is not None:
            assert still_looks >= OBSERVATIONS_MIN
            assert counted_s >= SETTINGS.wedge_idle_s
