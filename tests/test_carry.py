"""What is written in which order, what goes where in the next engine, and hostile manifests."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamactl_supervisor.carry import (
    Conversation,
    Manifest,
    Place,
    Taker,
    held,
    placed,
    surplus,
)
from llamactl_supervisor.models import Page, SlotState
from pydantic import ValidationError

OLD, NEW = "a" * 32, "b" * 32
ENGINE = Taker("/pages", "/m.gguf", "content", "f16/f16")


def conversation(
    number: int,
    *,
    slot: int | None = None,
    page: str | None = None,
    home: int | None = None,
    n_tokens: int = 10,
    engine: str = NEW,
    reason: str | None = None,
    taker: Taker = ENGINE,
    n_bytes: int = 0,
) -> Conversation:
    return Conversation(
        file=f"carry-{engine}-{number}",
        slot=slot,
        page=page,
        home=home,
        n_tokens=n_tokens,
        n_bytes=n_bytes,
        model=taker.model,
        directory=taker.directory,
        content=taker.content,
        cache_types=taker.cache_types,
        reason=reason,
        written=True,
    )


def left(number: int, **fields: Any) -> Conversation:
    """Return one that an engine before the last one held, and the last one did not take."""
    return conversation(number, engine=OLD, reason="it is of another model", **fields)


def order(*conversations: Conversation, n_seq: int = 2) -> list[tuple[int, str]]:
    """Return the numbers in the order in which they are brought back, and where to."""
    found = placed(conversations, range(n_seq))
    assert len(found) == len(conversations)
    return [(int(each.file.split("-")[2]), str(place)) for each, place in found]


def test_the_most_expensive_prefill_is_written_first() -> None:
    slots = [
        SlotState(id=0, n_ctx=1, n_prompt_tokens=5),
        SlotState(id=1, n_ctx=1, n_prompt_tokens=0),
        SlotState(id=2, n_ctx=1, n_prompt_tokens=70),
        SlotState(id=3, n_ctx=1, n_prompt_tokens=None),
        SlotState(id=0, n_ctx=1, n_prompt_tokens=9, parked=True, page="parked-1"),
    ]
    pages = [
        Page(name="fox", n_tokens=50, n_bytes=1),
        Page(name="parked-1", n_tokens=9, n_bytes=1, parked=True, slot=6),
    ]
    found = held(slots, pages, instance=OLD, engine=ENGINE)
    assert [(each.was, each.n_tokens) for each in found] == [
        (Place(2), 70),
        (Place(None, "fox"), 50),
        (Place(None, "parked-1"), 9),
        (Place(0), 5),
        (Place(3), 0),
    ]
    assert [each.file for each in found] == [f"carry-{OLD}-{number}" for number in range(1, 6)]
    assert {each.origin for each in found} == {OLD}
    assert {each.page: each.home for each in found if each.page} == {"fox": None, "parked-1": 6}
    again = held(
        [*slots, SlotState(id=4, n_ctx=1, n_prompt_tokens=3)],
        pages,
        instance=OLD,
        engine=ENGINE,
        seen={(each.was, each.n_tokens) for each in found},
    )
    assert [(each.was, each.file) for each in again] == [(Place(4), f"carry-{OLD}-6")]


def test_pages_come_first_and_slots_go_into_their_own() -> None:
    assert order(
        conversation(1, slot=1, n_tokens=70),
        conversation(2, page="fox", n_tokens=5),
        conversation(3, slot=0, n_tokens=80),
    ) == [(2, "page fox"), (3, "slot 0"), (1, "slot 1")]


def test_a_slot_without_its_own_goes_into_any_and_then_becomes_a_page() -> None:
    assert order(
        conversation(1, slot=3, n_tokens=70),
        conversation(2, slot=2, n_tokens=80),
        conversation(3, slot=1, n_tokens=5),
    ) == [(1, "page carried-1"), (2, "slot 0"), (3, "slot 1")]


def test_what_was_parked_goes_into_its_slot_or_any_that_is_free_and_else_is_parked_again() -> None:
    parked = [
        conversation(1, page="parked-0", home=3, n_tokens=90),
        conversation(2, page="parked-1", home=1, n_tokens=80),
        conversation(3, page="carried-1", home=2, n_tokens=70),
    ]
    resident = conversation(4, slot=0, n_tokens=5)
    assert order(*parked, resident, n_seq=4) == [
        (4, "slot 0"),
        (1, "slot 3"),
        (2, "slot 1"),
        (3, "slot 2"),
    ]
    assert order(*parked, resident, n_seq=2) == [
        (1, "page carried-2"),
        (3, "page carried-1"),
        (4, "slot 0"),
        (2, "slot 1"),
    ]
    homes = {place.home for _, place in placed([*parked, resident], range(1)) if place is not None}
    assert homes == {None, 1, 2, 3}


def test_names_of_pages_are_kept_unless_they_cannot_be() -> None:
    assert order(
        conversation(1, page="parked-1", n_tokens=9),
        conversation(2, page="fox", n_tokens=8),
        conversation(3, page="fox", n_tokens=7),
        conversation(4, page="carried-1", n_tokens=6),
        n_seq=1,
    ) == [
        (1, "page carried-2"),
        (2, "page fox"),
        (3, "page carried-3"),
        (4, "page carried-1"),
    ]


def test_what_was_left_gets_what_the_last_engine_did_not_hold() -> None:
    """However long it is: neither a slot nor a name is taken from what was in use."""
    assert order(
        left(1, slot=0, n_tokens=900),
        left(2, slot=1, n_tokens=800),
        left(3, page="fox", n_tokens=700),
        left(4, page="hen", n_tokens=600),
        left(5, page="hen", n_tokens=500),
        conversation(6, slot=1, n_tokens=5),
        conversation(7, page="fox", n_tokens=4),
    ) == [
        (7, "page fox"),
        (4, "page hen"),
        (6, "slot 1"),
        (1, "slot 0"),
        (2, "None"),
        (3, "None"),
        (5, "None"),
    ]


def test_of_what_was_left_the_last_engine_s_comes_first() -> None:
    assert order(
        left(1, slot=0, n_tokens=900),
        conversation(2, slot=0, n_tokens=7, reason="the window is too small"),
        n_seq=1,
    ) == [(2, "slot 0"), (1, "None")]


@pytest.mark.parametrize(
    ("of", "refusal"),
    [
        (ENGINE, None),
        (replace(ENGINE, model="/moved.gguf"), None),
        (replace(ENGINE, cache_types=None), None),
        (replace(ENGINE, content=None), None),
        (replace(ENGINE, content="x"), "it is of another model, which was /m.gguf before"),
        (replace(ENGINE, model="/n.gguf", content="x"), "it is of another model, /n.gguf"),
        (replace(ENGINE, model="/n.gguf", content=None), "it is of another model, /n.gguf"),
        (replace(ENGINE, directory="/d"), "its files are in /d, this engine's are in /pages"),
        (
            replace(ENGINE, cache_types="q8_0/f16"),
            "its KV types are q8_0/f16, this engine's are f16/f16",
        ),
    ],
)
def test_what_cannot_fit_is_known_and_why(of: Taker, refusal: str | None) -> None:
    assert ENGINE.refusal(conversation(1, slot=0, taker=of)) == refusal


def test_what_was_left_longest_ago_goes_where_there_is_too_much_of_it() -> None:
    found = [
        left(1, slot=0, n_bytes=50),
        conversation(2, slot=0, n_bytes=1000),
        left(3, slot=0, n_bytes=30),
        left(4, slot=0, n_bytes=30),
    ]
    assert surplus(found, 110) == []
    assert surplus(found, 109) == surplus(found, 60) == [found[0]]
    assert surplus(found, 59) == [found[0], found[2]]
    assert surplus(found, 0) == [found[0], found[2], found[3]]


@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(0, 5), st.sampled_from(["fox", "parked-1", "carried-1"])),
            st.integers(1, 4),
            st.sampled_from([None, "it is of another model"]),
        ),
        max_size=12,
    ),
    st.integers(1, 6),
)
def test_each_goes_to_one_place_and_no_two_to_the_same(
    found: list[tuple[int | str, int, str | None]], n_seq: int
) -> None:
    conversations = [
        conversation(
            number,
            slot=where if isinstance(where, int) else None,
            page=where if isinstance(where, str) else None,
            n_tokens=n_tokens,
            reason=reason,
        )
        for number, (where, n_tokens, reason) in enumerate(found)
    ]
    told = order(*conversations, n_seq=n_seq)
    assert sorted(number for number, _ in told) == list(range(len(found)))
    places = [place for _, place in told if place != "None"]
    assert len(set(places)) == len(places)
    ours = [number for number, (_, _, model) in enumerate(found) if model == "/m.gguf"]
    assert all(place != "None" for number, place in told if number in ours)
    kinds = [place[:4] for number, place in told if number in ours]
    assert kinds == sorted(kinds), "pages before slots"


@pytest.mark.parametrize(
    "file",
    [
        "../../etc/passwd",
        f"carry-{OLD}-1/../../x",
        f"carry-{OLD}-1\n",
        f"carry-{OLD}-",
        f"carry-{OLD[1:]}-1",
        f"carry-{OLD}-1.ckpt",
        f"/carry-{OLD}-1",
        "",
    ],
)
def test_a_file_of_a_manifest_is_a_name_of_ours(file: str) -> None:
    good = conversation(1, slot=0).model_dump()
    Manifest.model_validate({"version": 1, "conversations": [good]})
    with pytest.raises(ValidationError):
        Manifest.model_validate({"version": 1, "conversations": [good | {"file": file}]})


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2, "conversations": []},
        {"version": 1, "conversations": [], "more": 1},
        {"version": 1, "conversations": [{}]},
        {"version": 1, "conversations": None},
        [],
    ],
)
def test_what_is_no_manifest_is_none(fields: object) -> None:
    with pytest.raises(ValidationError):
        Manifest.model_validate_json(json.dumps(fields))


def test_a_manifest_takes_in_replaces_and_drops_by_file() -> None:
    first, second = (conversation(slot + 1, slot=slot, engine=OLD) for slot in (0, 1))
    manifest = Manifest().add([first, second])
    into = second.model_copy(update={"into": NEW})
    manifest = manifest.add([into])
    assert manifest.conversations == (first, into)
    assert manifest.held_by(NEW) == (into,)
    assert manifest.held_by(OLD) == (first, into)
    assert manifest.held_by("c" * 32) == ()
    assert manifest.drop({first.file}).conversations == (into,)
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
