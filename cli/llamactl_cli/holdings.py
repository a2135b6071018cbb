"""What an engine holds, as rows of a table: slots with a bar of their window, pages, memory.

And what changing it took: the last pauses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llamactl_cli import text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from llamactl_supervisor.models import AvoidedLine, EngineLook, SlotState

    from llamactl_cli.smaps import Resident

    Rows = Iterator[tuple[str, str | None]]

BAR_CELLS = 20
SLOTS_MAX = 8
"""As many slots, and as many parked ones, have a line of their own: it is one screen."""

ASLEEP = "asleep: they hold nothing now, pages stay; `llamactl slots` wakes it"


def slots(look: EngineLook, rates: Mapping[int, float] | None = None) -> Rows:
    """Yield a row for each slot and parked conversation; `rates` are tokens per second by slot."""
    if look.slots is None:
        why = ASLEEP if look.asleep else "not known"
        yield "slots", why if look.problem is None else f"{why}: {look.problem.message}"
        return
    placed = [slot for slot in look.slots if not slot.parked]
    parked = [slot for slot in look.slots if slot.parked]
    for slot in placed[:SLOTS_MAX]:
        yield f"slot {slot.id}", _slot(slot, (rates or {}).get(slot.id))
    for slot in parked[:SLOTS_MAX]:
        waits = ", its request waits" if slot.is_processing else ""
        name = text.middle(slot.page or "", 24)
        yield "parked", f"{slot.n_prompt_tokens or 0} tokens as {name}, slot {slot.id}{waits}"
    for what, rest in (("slot", placed[SLOTS_MAX:]), ("parked", parked[SLOTS_MAX:])):
        if rest:
            held = sum(slot.n_prompt_tokens or 0 for slot in rest)
            yield what, f"{len(rest)} more, {held} tokens in all: `llamactl slots`"


def pages(look: EngineLook) -> str:
    """Return how many pages there are, and what they take."""
    parked = sum(page.parked for page in look.pages)
    n_bytes = sum(page.n_bytes for page in look.pages)
    return f"{text.count(len(look.pages), 'page')}, {text.size(n_bytes)}, {parked} parked"


def memory(
    resident: Resident, look: EngineLook | None, full_contexts: Mapping[str, int] | None
) -> dict[str, Any]:
    """Return the resident bytes by what they are for; the parts add up to the whole.

    `committed_bytes` is what the process has for itself, touched or not. `full_contexts_bytes` is
    what the contexts take by device once they are full; None where that is unknown, since the
    engine says it with a change only. What is on a GPU is not part of a resident size.
    """
    kept = 0 if look is None else sum(page.n_bytes for page in look.pages)
    kept = min(kept, resident.anonymous_bytes)  # the rest of it is swapped
    return {
        "resident_bytes": resident.total_bytes,
        "weights_bytes": resident.weights_bytes,
        "files_bytes": resident.files_bytes,
        "pages_bytes": kept,
        "contexts_bytes": resident.anonymous_bytes - kept,
        "swapped_bytes": resident.swapped_bytes,
        "committed_bytes": resident.committed_bytes,
        "full_contexts_bytes": None if full_contexts is None else dict(full_contexts),
    }


def memory_rows(parts: Mapping[str, Any]) -> Rows:
    """Yield a row for each part and one for the sum."""
    named = (
        ("weights_bytes", "weights, mapped from the model's file"),
        ("files_bytes", "program and libraries"),
        ("pages_bytes", "pages and parked conversations"),
        ("contexts_bytes", "KV, checkpoints, compute buffers and the rest"),
    )
    for number, (part, title) in enumerate(named):
        yield "" if number else "memory", f"{text.size(parts[part]):>10}  {title}"
    full = parts["full_contexts_bytes"]
    sums = [f"resident, {text.size(parts['committed_bytes'])} committed"]
    if parts["swapped_bytes"]:
        sums.append(f"{text.size(parts['swapped_bytes'])} swapped out")
    if full is not None:
        sums.append(f"full contexts take {text.size(sum(full.values()))}")
    yield "", f"{text.size(parts['resident_bytes']):>10}  {', '.join(sums)}"


def pauses(lines: Sequence[AvoidedLine]) -> Rows:
    """Yield a row for each of the last pauses, the newest first."""
    for number, line in enumerate(reversed(lines)):
        before, after = text.shape(line.previous), text.shape(line.geometry)
        spent = f"{line.pause_ms:.1f} ms, {before} -> {after}, {text.local(line.at)}"
        yield "" if number else "last pause", spent


def _slot(slot: SlotState, rate: float | None) -> str:
    held = slot.n_prompt_tokens or 0
    facts = [f"{held} of {slot.n_ctx} tokens"]
    if slot.is_processing:
        facts.append("busy")
    if rate is not None:
        facts.append(f"{rate:.1f} tok/s")
    return f"[{text.bar(held, slot.n_ctx, BAR_CELLS)}]  {', '.join(facts)}"
