"""What becomes of each conversation of an engine in a change that is only planned. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llamactl_supervisor import carry
from llamactl_supervisor.models import Fate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llamactl_supervisor.carry import Conversation, Place, Taker
    from llamactl_supervisor.models import Page, ParkedSlot, PlanField, Receipt, SlotFate
    from llamactl_supervisor.spec import EngineSpec

CELLS = 256
"""The tokens of a slot are a multiple of this."""
IDENTITY = (
    *("--model", "--override-kv", "--control-vector", "--cache-type-", "--flash-attn"),
    *("--swa-full", "--rope-", "--yarn-", "--spec-draft-model"),
)
"""How options begin that the values in a KV cache depend on: files are of one such engine."""
UNASKED = {"--cache-type-": "f16", "--flash-attn": "auto"}
"""What an engine takes that is not given such an option."""
_OFF = frozenset({"off", "0", "false", "disabled"})
_PLACED = "placed"
_PARKED = {
    "n_seq": "there is no such slot any more",
    "window": "its slot would hold {fit} tokens",
    "cells": "the slots' pool would hold {fit} tokens of it",
}
"""Why an engine parks a conversation, by the reason that it gives."""


@dataclass(frozen=True)
class Next:
    """The engine that would take over what another one holds.

    `window` is how many tokens a slot has, or all of them that share one pool; None: it chooses.
    `takes_files` False: it cannot begin quiet, and so is given nothing.
    """

    n_seq: int
    window: int | None
    is_unified: bool
    taker: Taker
    takes_files: bool
    reasons: tuple[PlanField, ...]


def window(n_ctx: int, n_seq: int, *, is_unified: bool) -> int:
    """Return how many tokens a slot has of `n_ctx` in all."""
    return n_ctx if is_unified else -(-(n_ctx // n_seq) // CELLS) * CELLS


def cache_types(spec: EngineSpec) -> str:
    """Return the KV types of an engine that is started like that."""
    asked = (spec.options.get(f"--cache-type-{which}", ()) for which in "kv")
    return "/".join(one[-1][-1] if one else UNASKED["--cache-type-"] for one in asked)


def live(receipt: Receipt, pages: Iterable[Page]) -> tuple[Fate, ...]:
    """Return what becomes of each in a change on the loaded weights, which the engine has planned.

    `pages` are what it holds beside its slots.
    """
    parked = {each.slot: each for each in receipt.parked}
    slots = [_placed(each) for each in receipt.slots if each.tokens and each.slot not in parked]
    room = receipt.geometry.n_ctx_slot
    return (*slots, *map(_parked, parked.values()), *stay(pages, room))


def stay(pages: Iterable[Page], room: int | None = None) -> tuple[Fate, ...]:
    """Return what becomes of the pages that no slot is waiting for; `room`: tokens of a slot."""
    return tuple(
        Fate(what=f"page {each.name}", n_tokens=each.n_tokens, outcome="stays", fate=said)
        for each in pages
        if not each.parked
        for said in [_stays(each.n_tokens, room)]
    )


def _stays(n_tokens: int, room: int | None) -> str:
    if room is None or n_tokens <= room:
        return "stays in memory"
    return f"stays in memory, longer than a slot would be ({room} tokens)"


def _placed(each: SlotFate) -> Fate:
    what, said = f"slot {each.slot}", "stays in its slot"
    if each.fate == _PLACED:
        what, said = "parked", f"goes back into slot {each.slot}"
        if each.other_slot is not None:
            said = f"goes into slot {each.slot}, it had slot {each.other_slot}"
    return Fate(what=what, n_tokens=each.tokens, outcome="stays", fate=said)


def _parked(each: ParkedSlot) -> Fate:
    why = _PARKED.get(each.reason, each.reason).format(fit=each.tokens_fit)
    goes_on = "; its request goes on when it is back" if each.running else ""
    said = f"parked whole until a change has room for it: {why}{goes_on}"
    what = f"slot {each.slot}"
    return Fate(what=what, n_tokens=each.tokens_held, outcome="parked", fate=said)


def relaunched(
    held: Sequence[Conversation],
    in_files: Sequence[Conversation],
    busy: Mapping[int, str],
    to: Next,
) -> tuple[Fate, ...]:
    """Return what becomes of each when the engine gives way to another one.

    `in_files` are those that files hold by now, `busy` says what becomes of the request in a slot.
    """
    others = [text for text in map(_other, to.reasons) if text is not None]
    refused = {each.file: to.taker.refusal(each) for each in in_files}
    refused |= {each.file: _refusal(each, others, to.taker) for each in held}
    if not to.takes_files:
        quiet = "the next engine cannot begin quiet, so nothing is brought back into it"
        refused = dict.fromkeys(refused, quiet)
    everyone = (*in_files, *held)
    order = carry.placed([e for e in everyone if refused[e.file] is None], range(to.n_seq))
    places, cells = {each.file: place for each, place in order}, 0
    for each, place in order:
        refused[each.file] = _unfit(each, place, to, cells)
        if refused[each.file] is None and place is not None and place.page is None:
            cells += each.n_tokens
    files = {each.file for each in in_files}
    found = []
    for each in (*held, *in_files):
        here, why = each.file in files, refused[each.file]
        if why is None:
            said = "taken out of its files" if here else "carried over by files"
            said += _as(each, places[each.file])
        else:
            said = f"{'stays' if here else 'kept'} in files: {why}"
        request = None if here or each.slot is None else busy.get(each.slot)
        outcome: Literal["carried", "left"] = "carried" if why is None else "left"
        fate = said if request is None else f"{said}; {request}"
        what = str(each.was)
        found.append(Fate(what=what, n_tokens=each.n_tokens, outcome=outcome, fate=fate))
    return tuple(found)


def _refusal(each: Conversation, others: Sequence[str], taker: Taker) -> str | None:
    """Return why the next engine takes nothing of the one that runs."""
    if others:
        return f"the next engine is another: {', '.join(others)}"
    return taker.refusal(each) if each.directory != taker.directory else None


def lost(held: Iterable[Conversation], why: str) -> tuple[Fate, ...]:
    """Return that nothing can be kept."""
    return tuple(
        Fate(what=str(each.was), n_tokens=each.n_tokens, outcome="lost", fate=f"lost: {why}")
        for each in held
    )


def _as(each: Conversation, place: Place | None) -> str:
    """Return where it is then, if not where it was."""
    if place is None or str(place) == str(each.was):
        return ""
    return f" as {place}" if place.page else f" into {place}"


def _unfit(each: Conversation, place: Place | None, to: Next, cells: int) -> str | None:
    """Return why the next engine does not take it; None: it does."""
    if place is None:
        return "no slot is free for it"
    taken = cells if to.is_unified and place.page is None else 0
    if to.window is not None and each.n_tokens > to.window - taken:
        there = f"a slot has {to.window} tokens"
        return f"{there}, {taken} of them taken" if taken else there
    return None


def _other(reason: PlanField) -> str | None:
    """Return how the next engine's KV cache is another for this reason; None: it is not."""
    name = reason.field
    if not name.startswith(IDENTITY):
        return None
    unasked = next((value for stem, value in UNASKED.items() if name.startswith(stem)), None)
    before, after = (unasked if word is None else word for word in (reason.before, reason.after))
    if name == "--flash-attn" and (before in _OFF) == (after in _OFF):
        return None
    if before == after:
        return None
    return f"{name} is {_told(after)}, not {_told(before)}"


def _told(value: object) -> str:
    return "not given" if value is None else str(value)
