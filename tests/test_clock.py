"""The daemon's clock: it goes on while the daemon runs, and a time in which it did not is lost."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamactl_supervisor.clock import LATE_S, TICK_S, Clock


class Hand:
    """A monotonic clock that is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.at)


def test_a_clock_that_is_looked_at_goes_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)
    clock = Clock()
    for _ in range(1000):
        hand.at += LATE_S
        assert clock.now() == hand.at


@pytest.mark.parametrize("stopped_s", [0.6, 3.0, 86400.0])
def test_a_gap_counts_for_one_tick(monkeypatch: pytest.MonkeyPatch, stopped_s: float) -> None:
    hand = Hand(monkeypatch)
    clock = Clock()
    before = clock.now()
    hand.at += stopped_s
    assert clock.now() == pytest.approx(before + TICK_S)
    hand.at += TICK_S
    assert clock.now() == pytest.approx(before + 2 * TICK_S)


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_it_never_goes_back_and_never_stands_still_for_good(steps: list[float]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        hand = Hand(monkeypatch)
        clock = Clock()
        last = clock.now()
        for step in steps:
            hand.at += step
            now = clock.now()
            assert last <= now <= hand.at
            assert now - last >= min(step, TICK_S) - 1e-6
            last = now
