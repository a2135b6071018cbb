"""Counters of engines that follow each other are one counter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamactl_supervisor.scrape import EngineCounters

if TYPE_CHECKING:
    from prometheus_client import Metric

PAUSE = "llamacpp:reconfigure_pause_seconds"


def exposition(total: float, *, busy: float = 0.0, longest: int = 0, extra: str = "") -> bytes:
    """Return what an engine says that has counted so far."""
    return f"""# HELP llamacpp:n_decode_total Calls
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total {total}
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max {longest}
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing {busy}
# TYPE {PAUSE} histogram
{PAUSE}_bucket{{le="0.1"}} {total}
{PAUSE}_bucket{{le="+Inf"}} {total}
{PAUSE}_sum{{}} {total / 2}
{PAUSE}_count{{}} {total}
{extra}""".encode()


def values(families: list[Metric]) -> dict[str, float]:
    """Return the samples by name and labels, as text."""
    return {
        sample.name.removeprefix("llamacpp:") + "".join(sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_counters_and_histograms_of_a_dead_engine_are_added_to_the_next() -> None:
    counters = EngineCounters()
    counters.families("a", exposition(5, busy=2, longest=900))
    counters.families("a", exposition(7, busy=1, longest=900))
    assert values(counters.families("b", exposition(2, busy=1, longest=300))) == {
        "n_decode_total": 9,
        "n_tokens_max": 300,
        "requests_processing": 1,
        "reconfigure_pause_seconds_bucket0.1": 9,
        "reconfigure_pause_seconds_bucket+Inf": 9,
        "reconfigure_pause_seconds_sum": 4.5,
        "reconfigure_pause_seconds_count": 9,
    }
    # one that has counted further by its first scrape than the one before it ever did
    assert values(counters.families("c", exposition(20)))["n_decode_total"] == 29


def test_a_counter_that_begins_anew_in_one_engine_goes_on() -> None:
    counters = EngineCounters()
    found = [
        values(counters.families("a", exposition(total)))["n_decode_total"]
        for total in (5, 0, 3, 3, 1)
    ]
    assert found == [5, 5, 8, 8, 9]


def test_a_sample_that_is_not_there_at_first_still_goes_on() -> None:
    name = "llamacpp:drafts_total"
    typed = f"# TYPE {name} counter\n"
    counters = EngineCounters()
    counters.families("a", exposition(0, extra=f'{typed}{name}{{position="0"}} 4\n'))
    assert "drafts_total0" not in values(counters.families("b", exposition(0)))
    again = counters.families("b", exposition(0, extra=f'{typed}{name}{{position="0"}} 6\n'))
    assert values(again)["drafts_total0"] == 10


def test_what_is_not_the_engines_is_left_out() -> None:
    extra = "# TYPE llamactl_crashes_total counter\nllamactl_crashes_total 7\n"
    found = values(EngineCounters().families("a", exposition(1, extra=extra)))
    assert not [name for name in found if "crashes" in name]


@pytest.mark.parametrize("broken", [b"\xff", b"llamacpp:x{", b"<html>oops</html>", b"a b c d"])
def test_what_is_no_exposition_is_not_remembered(broken: bytes) -> None:
    counters = EngineCounters()
    counters.families("a", exposition(5))
    with pytest.raises(ValueError):  # noqa: PT011 - the parser has no error of its own
        counters.families("b", exposition(9) + broken)
    assert values(counters.families("a", exposition(5)))["n_decode_total"] == 5


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=12))
def test_no_counter_ever_goes_back(seen: list[tuple[str, int]]) -> None:
    counters, before = EngineCounters(), -math.inf
    for instance, total in seen:
        found = values(counters.families(instance, exposition(total)))
        assert found["n_decode_total"] >= before
        before = found["n_decode_total"]
        assert found["reconfigure_pause_seconds_count"] == before
