"""What is said of each conversation before a change: where it goes, or why it stays behind."""

from __future__ import annotations

from typing import Any

import pytest
from llamactl_supervisor import fates
from llamactl_supervisor.carry import Conversation, Taker
from llamactl_supervisor.models import Page, PlanField, Receipt

NEXT: dict[str, Any] = {
    "n_seq": 2,
    "window": 4096,
    "is_unified": False,
    "taker": Taker("/pages", "/m.gguf"),
    "takes_files": True,
    "reasons": (PlanField(field="--threads", kind="context", before=None, after="3"),),
}


def conversation(number: int, n_tokens: int, **where: Any) -> Conversation:
    known: dict[str, Any] = {"directory": "/pages", "model": "/m.gguf", "n_tokens": n_tokens}
    return Conversation(file=f"carry-{'0' * 32}-{number}", **(known | where))


def told(*held: Conversation, **to: Any) -> list[tuple[str, str, str]]:
    found = fates.relaunched(held, (), {}, fates.Next(**(NEXT | to)))
    return [(each.what, each.outcome, each.fate) for each in found]


def test_what_the_next_engine_takes_is_carried_to_where_there_is_room() -> None:
    fox, first, third = (
        conversation(1, 900, page="fox"),
        conversation(2, 400, slot=0),
        conversation(3, 300, slot=2),
    )
    assert told(fox, first, third) == [
        ("page fox", "carried", "carried over by files"),
        ("slot 0", "carried", "carried over by files"),
        ("slot 2", "carried", "carried over by files into slot 1"),
    ]
    assert told(first, third, n_seq=1)[1] == (
        *("slot 2", "carried"),
        "carried over by files as page carried-1",
    )


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ({"taker": Taker("/other", "/m.gguf")}, "this engine's are in /other"),
        ({"takes_files": False}, "cannot begin quiet"),
        ({"window": 256}, "a slot has 256 tokens"),
    ],
)
def test_what_it_does_not_take_stays_in_its_files(to: dict[str, Any], why: str) -> None:
    ((_, outcome, fate),) = told(conversation(1, 400, slot=0), **to)
    assert outcome == "left"
    assert fate.startswith("kept in files: ")
    assert why in fate


def test_slots_that_share_a_pool_share_its_room() -> None:
    held = conversation(1, 400, slot=0), conversation(2, 300, slot=1)
    found = told(*held, window=512, is_unified=True)
    assert [outcome for _, outcome, _ in found] == ["carried", "left"]
    assert found[1][2] == "kept in files: a slot has 512 tokens, 400 of them taken"
    assert [outcome for _, outcome, _ in told(*held, window=512)] == ["carried", "carried"]


@pytest.mark.parametrize(
    ("field", "before", "after", "differs"),
    [
        ("--model", "/m.gguf", "/other.gguf", True),
        ("--cache-type-k", None, "q8_0", True),
        ("--cache-type-k", None, "f16", False),
        ("--cache-type-v", "f16", None, False),
        ("--flash-attn", None, "on", False),
        ("--flash-attn", "on", "off", True),
        ("--rope-scale", None, "2", True),
        ("--threads", None, "2", False),
        ("engine", "b1", "b2", False),
    ],
)
def test_files_are_of_one_model_and_one_kind_of_cache(
    field: str, before: str | None, after: str | None, differs: bool
) -> None:
    reason = PlanField(field=field, kind="context", before=before, after=after)
    ((_, outcome, fate),) = told(conversation(1, 400, slot=0), reasons=(reason,))
    assert (outcome == "left") is differs
    assert (field in fate) is differs


def test_what_files_hold_already_is_told_beside_it() -> None:
    held, old = conversation(1, 400, slot=0), conversation(2, 5000, page="fox")
    to = fates.Next(**NEXT)
    one, other = fates.relaunched((held,), (old,), {0: "its request is ended"}, to)
    assert one.fate == "carried over by files; its request is ended"
    assert (other.outcome, other.fate) == ("left", "stays in files: a slot has 4096 tokens")


@pytest.mark.parametrize(
    ("n_ctx", "n_seq", "unified", "expected"), [(10000, 3, False, 3584), (10000, 3, True, 10000)]
)
def test_the_window_is_as_the_engine_rounds_it(
    n_ctx: int, n_seq: int, unified: bool, expected: int
) -> None:
    assert fates.window(n_ctx, n_seq, is_unified=unified) == expected


def test_a_live_change_keeps_parks_or_places_each() -> None:
    receipt = Receipt.model_validate(
        {
            "outcome": "planned",
            "previous": {"n_ctx": 8192, "n_seq": 2},
            "geometry": {"n_ctx": 512, "n_seq": 1, "n_ctx_slot": 512},
            "slots": [
                {"slot": 0, "tokens": 404, "fate": "resident"},
                {"slot": 1, "tokens": 304, "fate": "parked"},
                {"slot": 2, "tokens": 7, "fate": "placed", "from": 2},
                {"slot": 3, "tokens": 8, "fate": "placed", "from": 5},
            ],
            "parked": [
                {"slot": 1, "tokens_held": 304, "tokens_fit": 0, "reason": "n_seq"}
                | {"running": True}
            ],
        }
    )
    pages = (
        Page(name="fox", n_tokens=9, n_bytes=1),
        Page(name="long", n_tokens=900, n_bytes=1),
        Page(name="parked-0", n_tokens=304, n_bytes=1, parked=True),
    )
    found = [(each.what, each.outcome, each.fate) for each in fates.live(receipt, pages)]
    assert found == [
        ("slot 0", "stays", "stays in its slot"),
        ("parked", "stays", "goes back into slot 2"),
        ("parked", "stays", "goes into slot 3, it had slot 5"),
        (
            *("slot 1", "parked"),
            "parked whole until a change has room for it: there is no such slot any more; "
            "its request goes on when it is back",
        ),
        ("page fox", "stays", "stays in memory"),
        ("page long", "stays", "stays in memory, longer than a slot would be (512 tokens)"),
    ]
