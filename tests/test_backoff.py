"""The delay before a retry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from llamactl_supervisor.backoff import delay_s


def test_the_bound_doubles_up_to_the_cap() -> None:
    bounds = [delay_s(n, 1.0, base_s=1.0, cap_s=10.0) for n in range(1, 7)]
    assert bounds == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@given(st.integers(0, 10**9), st.floats(0, 1, exclude_max=True), st.floats(0.01, 100))
def test_the_delay_is_never_outside_its_bound(crashes: int, jitter: float, base_s: float) -> None:
    assert 0.0 <= delay_s(crashes, jitter, base_s=base_s, cap_s=60.0) <= 60.0
