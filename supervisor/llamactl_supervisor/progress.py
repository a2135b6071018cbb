"""Whether an engine that works gets anywhere: what was observed of it, folded into a verdict.

The counter of the patched engine (`compute_progress` in /props) moves with every micro-batch, in
the middle of a prefill as well. A micro-batch may take minutes on a small machine, so a counter
that stands still condemns nobody by itself: the second witness is what the kernel says that the
process did, in CPU time and in bytes from and to the disk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamactl_supervisor.settings import Settings

ANSWER_S = 2.0
"""How long health and properties may take; the engine answers them beside its work in 10 ms."""
OBSERVATIONS_MIN = 3
"""Fewer observations of a standstill prove none, whatever time lies between them."""
CPU_SHARE_MIN = 0.02
CPU_STEP_S = 0.05
"""More CPU time than this step and that share of a core is work, less is answering questions."""
UBATCHES_LONG = 20
"""A micro-batch may take so many times as long as the longest one before it."""


@dataclass(frozen=True)
class Activity:
    """What the kernel says that a process has done. `is_stopped`: by a signal or a debugger."""

    cpu_s: float
    disk_bytes: int = 0
    is_stopped: bool = False


@dataclass(frozen=True)
class Answer:
    """What the engine says of its work; None: it does not say. An older engine has no counter."""

    n_ubatches: int | None = None
    is_working: bool | None = None
    is_sleeping: bool | None = None


@dataclass(frozen=True)
class Observation:
    """One look at the engine. `at` is on the daemon's clock; `answer` None: none came in time."""

    at: float
    answer: Answer | None
    activity: Activity
    pulse: int = 0
    """Moves while the engine writes to its output."""


@dataclass(frozen=True)
class Standstill:
    """Nothing known has moved. The two times count no gap between our own observations in full."""

    observations: int
    still_s: float
    idle_s: float
    """The last part of `still_s`, in which the process has not done anything either."""
    mark: Activity
    """What it had done when that part began."""
    cpu_s: float = 0.0
    """CPU time that it has used over all of `still_s`."""


@dataclass(frozen=True)
class Wedge:
    """An engine that gets nowhere: why, for people, and the evidence in numbers."""

    why: str
    evidence: dict[str, object]


@dataclass(frozen=True)
class Progress:
    """What all observations so far come to. `standstill` None: healthy."""

    last: Observation | None = None
    n_ubatches: int | None = None
    ubatch_s: float = 0.0
    """The longest time that one micro-batch may have taken so far."""
    standstill: Standstill | None = None
    wedge: Wedge | None = None


def observe(before: Progress, seen: Observation, settings: Settings) -> Progress:
    """Return the progress after one more observation.

    A gap between two of them counts for as long as one can regularly take and no longer: where
    the daemon could not look, the silence was its own.
    """
    gap_s = 0.0 if before.last is None else seen.at - before.last.at
    gap_s = min(gap_s, settings.probe_s + ANSWER_S)
    n_ubatches = before.n_ubatches
    if seen.answer is not None:
        n_ubatches = seen.answer.n_ubatches
    after = replace(before, last=seen, n_ubatches=n_ubatches, standstill=None, wedge=None)
    if not _stands_still(before, seen):
        return replace(after, ubatch_s=max(before.ubatch_s, _ubatch_s(before, seen, gap_s)))
    after = replace(after, standstill=_standstill(before, seen, gap_s))
    return replace(after, wedge=_wedge(after, settings))


def worked(mark: Activity, seen: Activity, over_s: float) -> bool:
    """Say whether a process has done more since `mark`, `over_s` seconds ago, than answer us."""
    cpu_s = seen.cpu_s - mark.cpu_s
    return cpu_s > CPU_STEP_S + CPU_SHARE_MIN * over_s or seen.disk_bytes > mark.disk_bytes


def _ubatch_s(before: Progress, seen: Observation, gap_s: float) -> float:
    """Return how long the micro-batch that has just ended may have taken; 0: it is not known."""
    last = None if before.last is None else before.last.answer
    if last is None or seen.answer is None or not (last.is_working and seen.answer.is_working):
        return 0.0
    if last.is_sleeping:
        return 0.0
    return gap_s + (before.standstill.still_s if before.standstill else 0.0)


def _stands_still(before: Progress, seen: Observation) -> bool:
    """Say whether it should have moved since the last observation and nothing shows that it did."""
    answer = seen.answer
    if answer is None:
        return True
    if not answer.is_working or answer.n_ubatches is None:
        return False
    return answer.n_ubatches == before.n_ubatches


def _standstill(before: Progress, seen: Observation, gap_s: float) -> Standstill:
    still, activity = before.standstill, seen.activity
    if still is None:  # it may have begun at any time since the last observation: just now
        return Standstill(1, 0.0, 0.0, activity)
    observations, still_s = still.observations + 1, still.still_s + gap_s
    assert before.last is not None
    cpu_s = still.cpu_s + activity.cpu_s - before.last.activity.cpu_s
    idle_s = still.idle_s + gap_s
    written = _wakes(seen) and before.last is not None and seen.pulse != before.last.pulse
    if written or worked(still.mark, activity, idle_s):
        return Standstill(observations, still_s, 0.0, activity, cpu_s)
    return Standstill(observations, still_s, idle_s, still.mark, cpu_s)


def _wakes(seen: Observation) -> bool:
    """Say whether the engine loads its weights after a sleep: a load, and judged like one."""
    return seen.answer is not None and bool(seen.answer.is_sleeping and seen.answer.is_working)


def _busy_s(progress: Progress, still: Standstill) -> float:
    """Return for how long it has been at work on what should be a micro-batch.

    Before the first one has ended nobody knows how long one takes here: what the machine gave it
    counts then, for a starved engine is not wedged, and of the time on the wall a part only.
    """
    if progress.ubatch_s:
        return still.still_s
    return min(still.still_s, max(still.cpu_s, still.still_s / UBATCHES_LONG))


def _wedge(progress: Progress, settings: Settings) -> Wedge | None:
    still, seen = progress.standstill, progress.last
    assert still is not None
    assert seen is not None
    if still.observations < OBSERVATIONS_MIN:
        return None
    wakes = _wakes(seen)
    idle_max_s = settings.ready_stall_s if wakes else settings.wedge_idle_s
    busy_max_s = max(settings.wedge_busy_s, UBATCHES_LONG * progress.ubatch_s)
    if still.idle_s >= idle_max_s:
        limit_s, did = idle_max_s, f"has used no processor and no disk for {still.idle_s:.0f} s"
    elif not wakes and _busy_s(progress, still) >= busy_max_s:
        limit_s, did = busy_max_s, f"has come no further for {still.still_s:.0f} s"
    else:
        return None
    if seen.activity.is_stopped:
        what = "is stopped from outside (a signal or a debugger)"
    elif seen.answer is None:
        what = "answers no question"
    else:
        what = "loads its weights after a sleep" if wakes else "works on a request"
    evidence: dict[str, object] = {
        "answers": seen.answer is not None,
        "is_stopped": seen.activity.is_stopped,
        "is_waking": wakes,
        "n_ubatches": progress.n_ubatches,
        "still_s": round(still.still_s, 1),
        "idle_s": round(still.idle_s, 1),
        "limit_s": round(limit_s, 1),
        "longest_ubatch_s": round(progress.ubatch_s, 1),
        "observations": still.observations,
        "cpu_s": round(seen.activity.cpu_s, 2),
    }
    return Wedge(f"it {what}, and {did}", evidence)
