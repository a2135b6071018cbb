"""How long to wait before the next load after a crash: exponential, capped, full jitter."""

from __future__ import annotations


def delay_s(crashes: int, jitter: float, *, base_s: float, cap_s: float) -> float:
    """Return the delay in seconds before the retry that follows crash number `crashes` (from 1).

    `jitter` is drawn uniformly from [0, 1) by the caller. Full jitter, so that many machines
    whose engines died of one cause do not load again in step; the bound doubles up to `cap_s`.
    """
    doublings = min(max(crashes - 1, 0), 62)
    return jitter * min(cap_s, base_s * 2.0**doublings)
