"""What a smaller geometry has no place for is parked whole, named, and placed back."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from live_engine import N_CTX, N_SEQ, LiveEngine, live_engine
from sandbox import WITHIN_S, until
from streams import streaming_socket, streams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TALE = {
    "prompt": "Once upon a time there was a fox who lived beside a river. Every morning",
    "n_predict": 24,
    "temperature": 0,
    "ignore_eos": True,
}
LONG = TALE | {"n_predict": 120, "cache_prompt": False}
PROMPTS = ("The lighthouse keeper walked down to the shore and", "Water begins to boil when")


@pytest.fixture(scope="module")
def shared(engine_path: Path, model_path: Path) -> Iterator[LiveEngine]:
    with live_engine(engine_path, model_path, "--metrics") as live:
        yield live


@pytest.fixture
def engine(shared: LiveEngine) -> LiveEngine:
    """An engine with empty slots and the first geometry, whatever was done to it before."""
    shared.reset()
    return shared


def continued(live: LiveEngine, slot: int, said: str) -> Any:
    """Ask for more of the tale in a slot."""
    body = TALE | {"prompt": f"{TALE['prompt']}{said} Then", "id_slot": slot}
    return live.ask("/completion", **body).receipt


# Conversations


def test_a_slot_past_the_last_one_is_parked_and_comes_back_to_its_place(engine: LiveEngine) -> None:
    said = engine.ask("/completion", **TALE, id_slot=1).receipt["content"]
    held = engine.slots()[1]["n_prompt_tokens"]
    control = continued(engine, 1, said)
    engine.reset()
    engine.ask("/completion", **TALE, id_slot=1)

    receipt = engine.applied(n_seq=1)
    parked = {"slot": 1, "tokens_held": held, "tokens_fit": 0, "reason": "n_seq", "running": False}
    assert receipt["parked"] == [parked]
    assert receipt["slots"] == [{"slot": 1, "tokens": held, "fate": "parked"}]
    assert receipt["tokens_held"] == held

    (page,) = engine.pages()
    assert page["n_tokens"] == held
    assert page["n_bytes"] == page["n_bytes_target"] == receipt["bytes_held"] > held * 23040
    assert (page["slot"], page["reason"], page["parked"], page["running"]) == (
        1,
        "n_seq",
        True,
        False,
    )
    assert page["age_s"] >= 0
    assert engine.props()["parked"] == [{"page": page["name"], **parked}]
    (serving, listed) = engine.slots()
    assert "parked" not in serving
    assert (listed["id"], listed["parked"], listed["page"]) == (1, True, page["name"])
    assert engine.metric("parked_states") == 1

    assert engine.ask("/slots/1?action=erase").status == 400

    receipt = engine.applied(n_seq=2)
    assert receipt["slots"] == [{"slot": 1, "tokens": held, "fate": "placed", "from": 1}]
    assert receipt["parked"] == []
    assert engine.pages() == []
    assert engine.metric("parked_states") == 0
    again = continued(engine, 1, said)
    assert again["timings"]["cache_n"] == control["timings"]["cache_n"] > 30
    assert again["content"] == control["content"]


def test_what_the_window_cannot_hold_is_parked_until_it_can(engine: LiveEngine) -> None:
    held = engine.ask("/completion", prompt="word " * 400, n_predict=1, id_slot=1).receipt
    n_held = held["tokens_evaluated"]
    receipt = engine.applied(n_ctx=512)
    assert receipt["parked"] == [
        {"slot": 1, "tokens_held": n_held, "tokens_fit": 256, "reason": "window", "running": False}
    ]
    assert [slot["n_ctx"] for slot in engine.slots()[:2]] == [256, 256]
    # its slot serves others meanwhile
    assert engine.ask("/completion", **TALE, id_slot=1).status == 200
    receipt = engine.applied(n_ctx=1024)
    placed = [slot for slot in receipt["slots"] if slot["fate"] == "placed"]
    assert placed == [{"slot": 0, "tokens": n_held, "fate": "placed", "from": 1}]
    again = engine.ask("/completion", prompt="word " * 400, n_predict=1, id_slot=0).receipt
    assert again["timings"]["cache_n"] == n_held - 1


def test_a_unified_pool_keeps_what_was_used_last(engine: LiveEngine) -> None:
    for slot in (1, 0):
        engine.ask("/completion", prompt=f"{slot} " + "word " * 200, n_predict=1, id_slot=slot)
    tokens = [slot["n_prompt_tokens"] for slot in engine.slots()]
    receipt = engine.applied(n_ctx=256, kv_unified=True)
    assert receipt["parked"] == [
        {
            "slot": 1,
            "tokens_held": tokens[1],
            "tokens_fit": 256 - tokens[0],
            "reason": "pool",
            "running": False,
        }
    ]
    assert engine.applied(n_ctx=512, kv_unified=True)["parked"] == []


def test_a_dry_run_tells_who_would_be_parked_and_touches_nothing(engine: LiveEngine) -> None:
    engine.ask("/completion", **TALE, id_slot=1)
    before, slots = engine.props(), engine.slots()
    planned = engine.reconfigure(n_seq=1, dry_run=True).receipt
    assert planned["outcome"] == "planned"
    assert engine.props() == before
    assert engine.slots() == slots
    assert engine.applied(n_seq=1)["parked"] == planned["parked"]


# Generations


def controls(engine: LiveEngine) -> list[str]:
    """Return what each prompt alone and undisturbed is answered with."""
    return [engine.generate(LONG | {"prompt": [prompt]}).texts[0] for prompt in PROMPTS]


def test_a_parked_generation_goes_on_after_any_number_of_changes(engine: LiveEngine) -> None:
    control = controls(engine)
    engine.erase()
    with streams(engine) as running:
        first = running.start(**LONG | {"prompt": PROMPTS[0]}, id_slot=0)
        parked = running.start(**LONG | {"prompt": PROMPTS[1]}, id_slot=1)
        parked.reach(8)
        receipt = engine.applied(n_seq=1)
        assert [(each["slot"], each["running"]) for each in receipt["parked"]] == [(1, True)]
        stopped_at = receipt["parked"][0]["tokens_held"]
        for n_ctx in (8192, 2048, 4096):
            (still,) = engine.applied(n_ctx=n_ctx)["parked"]
            assert still["tokens_held"] == stopped_at
        assert first.text == control[0]
        assert not parked.ended
        receipt = engine.applied(n_seq=3)
        assert receipt["parked"] == []
        assert {"slot": 1, "tokens": stopped_at, "fate": "placed", "from": 1} in receipt["slots"]
        assert parked.text == control[1]
        assert parked.result()["id_slot"] == 1


def test_a_grammar_and_a_seed_go_on_after_parking(engine: LiveEngine) -> None:
    body = TALE | {
        "n_predict": 100,
        "ignore_eos": False,
        "temperature": 0.8,
        "seed": 11,
        "cache_prompt": False,
        "n_probs": 2,
        "json_schema": {
            "type": "array",
            "minItems": 12,
            "maxItems": 12,
            "items": {"type": "integer", "minimum": 100, "maximum": 999},
        },
    }
    control = engine.generate(body | {"prompt": [TALE["prompt"]]}).texts[0]
    engine.erase()
    with streams(engine) as running:
        stream = running.start(**body, id_slot=1)
        stream.reach(8)
        assert engine.applied(n_seq=1)["parked"][0]["running"]
        engine.applied(n_seq=2)
        assert stream.text == control
    assert len(json.loads(control)) == 12


def test_a_parked_prompt_goes_on_where_it_was(engine_path: Path, model_path: Path) -> None:
    """It was still being processed, and what is left of it would not fit the small window."""
    body = LONG | {"prompt": "word " * 800, "n_predict": 4, "id_slot": 1}
    with live_engine(engine_path, model_path, "--batch-size", "128") as live:
        control = live.ask("/completion", **body).receipt["content"]
        live.erase()
        with streams(live) as running:
            stream = running.start(**body)
            until(lambda: live.slots()[1]["is_processing"])
            receipt = live.applied(n_ctx=1024)
            (parked,) = receipt["parked"]
            assert (parked["slot"], parked["reason"], parked["tokens_fit"]) == (1, "window", 512)
            assert parked["tokens_held"] < 800
            live.applied(n_ctx=N_CTX)
            assert stream.text == control


def test_a_generation_at_the_end_of_its_window_comes_back_to_it(engine: LiveEngine) -> None:
    """It needs a cell or two more than the window has, as it always did: it ends there."""
    window = 512
    engine.applied(n_ctx=window * N_SEQ)
    body = LONG | {"prompt": "word " * (window - 60), "n_predict": -1, "id_slot": 1}
    control = engine.ask("/completion", **body).receipt
    assert control["truncated"]
    engine.erase()
    with streams(engine) as running:
        stream = running.start(**body)
        stream.reach(40)
        assert engine.applied(n_ctx=window)["parked"][0]["running"]
        assert engine.applied(n_ctx=window * N_SEQ)["parked"] == []
        assert stream.text == control["content"]


def test_the_choices_of_one_request_are_parked_apart(engine: LiveEngine) -> None:
    body = TALE | {"n_predict": 60, "n": 4, "temperature": 0.9, "seed": 3}
    engine.applied(n_ctx=16384, n_seq=4)

    def choices() -> list[str]:
        answer = engine.ask("/v1/completions", **body).receipt
        return [choice["text"] for choice in answer["choices"]]

    control = choices()
    assert len(set(control)) == 4
    engine.erase()
    with streams(engine) as running:
        answer = running.submit(choices)
        until(
            lambda: all(
                s["is_processing"] and s["next_token"][0]["n_decoded"] > 4 for s in engine.slots()
            )
        )
        receipt = engine.applied(n_seq=2)
        assert [each["slot"] for each in receipt["parked"]] == [2, 3]
        assert engine.applied(n_seq=4)["parked"] == []
        assert answer.result(WITHIN_S) == control


def test_choices_that_wait_for_their_slots_are_not_shrunk_away(engine: LiveEngine) -> None:
    engine.applied(n_ctx=16384, n_seq=4)
    with streams(engine) as running:
        busy = running.start(**LONG, id_slot=0)
        busy.reach(2)
        choices = running.submit(
            lambda: engine.ask("/v1/completions", **TALE | {"n": 4, "n_predict": 4})
        )
        until(lambda: engine.metric("requests_deferred") == 1)
        refused = engine.reconfigure(n_seq=2)
        assert (refused.status, refused.error["reason"]) == (409, "fan_out_in_progress")
        assert refused.error["details"] == {"n_seq_needed": 4, "n_seq": 2}
        busy.result()
        assert len(choices.result(WITHIN_S).receipt["choices"]) == 4
    engine.applied(n_seq=2)


def test_a_request_that_waits_goes_before_an_idle_conversation(engine: LiveEngine) -> None:
    (control,) = controls(engine)[1:]
    engine.erase()
    with streams(engine) as running:
        parked = running.start(**LONG | {"prompt": PROMPTS[1]}, id_slot=1)
        parked.reach(8)
        engine.applied(n_seq=1)
        engine.ask("/completion", **TALE, id_slot=0)
        idle = engine.slots()[0]["n_prompt_tokens"]
        receipt = engine.applied(n_ctx=8192)
        assert receipt["slots"] == [
            {"slot": 0, "tokens": idle, "fate": "parked"},
            {"slot": 0, "tokens": receipt["slots"][1]["tokens"], "fate": "placed", "from": 1},
        ]
        (displaced,) = receipt["parked"]
        assert (displaced["reason"], displaced["tokens_held"]) == ("displaced", idle)
        assert parked.text == control
    assert engine.applied(n_seq=2)["parked"] == []


def test_parked_time_counts_as_nobodys_work(engine: LiveEngine) -> None:
    with streams(engine) as running:
        started = time.monotonic()
        stream = running.start(**LONG, id_slot=1)
        stream.reach(8)
        engine.applied(n_seq=1)
        parked_since = time.monotonic()
        until(lambda: time.monotonic() > parked_since + 0.5)
        parked_s = time.monotonic() - parked_since
        engine.applied(n_seq=2)
        timings = stream.result()["timings"]
        wall_s = time.monotonic() - started
    assert (timings["prompt_ms"] + timings["predicted_ms"]) / 1000 < wall_s - parked_s


def test_a_parked_generation_whose_client_is_gone_is_freed(engine: LiveEngine) -> None:
    with streaming_socket(engine, **LONG | {"n_predict": -1, "id_slot": 1}):
        until(lambda: engine.slots()[1]["next_token"][0]["n_decoded"] > 4)
        assert engine.applied(n_seq=1)["parked"][0]["running"]
        assert len(engine.pages()) == 1
        assert engine.metric("requests_deferred") == 1
    # answers for others, /slots is one, do not keep the server from noticing
    until(lambda: len(engine.slots()) == 1, within_s=10)
    assert engine.pages() == []
    receipt = engine.applied(n_seq=2)
    assert (receipt["slots"], receipt["parked"]) == ([], [])
    assert engine.ask("/completion", **TALE, id_slot=1).status == 200


# Sleep


def test_a_parked_generation_keeps_the_server_awake(engine_path: Path, model_path: Path) -> None:
    with live_engine(engine_path, model_path, "--sleep-idle-seconds", "1") as live:
        with streaming_socket(live, **LONG | {"n_predict": -1, "id_slot": 1}):
            until(lambda: live.slots()[1]["next_token"][0]["n_decoded"] > 4)
            live.applied(n_seq=1)
            # no slot works now
            since = time.monotonic()
            until(lambda: live.props()["is_sleeping"] or time.monotonic() > since + 3)
            assert not live.props()["is_sleeping"]
            assert live.applied(n_seq=2)["slots"][0]["fate"] == "placed"
        until(lambda: live.props()["is_sleeping"])


def test_a_change_while_asleep_wakes_the_server_and_a_wake_keeps_the_geometry(
    engine_path: Path, model_path: Path
) -> None:
    with live_engine(engine_path, model_path, "--sleep-idle-seconds", "1") as live:
        live.ask("/completion", **TALE, id_slot=1)
        held = live.slots()[1]["n_prompt_tokens"]
        (parked,) = live.reconfigure(n_seq=1).receipt["parked"]
        assert parked["tokens_held"] == held
        until(lambda: live.props()["is_sleeping"])
        assert live.geometry()["n_seq"] == 1
        assert len(live.pages()) == 1, "a listing wakes nobody"
        assert live.props()["is_sleeping"]
        receipt = live.reconfigure(n_ctx=8192, n_seq=2).receipt
        assert receipt["previous"]["n_seq"] == 1
        assert receipt["n_weight_loads"] == 2, "the wake loads the model, the change does not"
        assert receipt["slots"] == [{"slot": 1, "tokens": held, "fate": "placed", "from": 1}]
        again = live.ask("/completion", **TALE, id_slot=1).receipt
        assert again["timings"]["cache_n"] > 10


# By force


def test_another_cache_type_is_a_cold_start_that_has_to_be_forced(engine: LiveEngine) -> None:
    engine.ask("/completion", **TALE, id_slot=0)
    engine.ask("/completion", **TALE, id_slot=1)
    held = engine.slots()[0]["n_prompt_tokens"]
    engine.applied(n_seq=1)
    before = engine.props()
    refused = engine.reconfigure(cache_type_k="q8_0")
    assert (refused.status, refused.error["reason"]) == (409, "cache_type_change")
    assert "force" in refused.error["message"]
    assert engine.props() == before

    n_dropped = engine.metric("reconfigure_dropped_total")
    planned = engine.reconfigure(cache_type_k="q8_0", force=True, dry_run=True).receipt
    assert engine.props() == before
    receipt = engine.applied(cache_type_k="q8_0", force=True)
    assert receipt["slots"] == planned["slots"]
    assert receipt["slots"] == [
        {"slot": 0, "tokens": held, "fate": "dropped"},
        {"slot": 1, "tokens": held, "fate": "dropped"},
    ]
    assert receipt["parked"] == []
    assert engine.geometry()["cache_type_k"] == "q8_0"
    assert engine.pages() == []
    assert engine.metric("reconfigure_dropped_total") == n_dropped + 2
    assert "by force" in engine.log()
    assert engine.ask("/completion", **TALE, id_slot=0).receipt["timings"]["cache_n"] == 0
    engine.applied(cache_type_k="f16", force=True)


def test_a_forced_change_ends_a_generation_by_name_and_starts_a_prompt_anew(
    engine_path: Path, model_path: Path
) -> None:
    prompt = LONG | {"prompt": "word " * 500, "n_predict": 4, "id_slot": 1}
    endless = LONG | {"n_predict": -1, "id_slot": 0}
    with (
        live_engine(engine_path, model_path, "--batch-size", "128") as live,
        streams(live) as running,
    ):
        live.applied(cache_type_k="f32", force=True)
        control = live.ask("/completion", **prompt).receipt["content"]
        live.applied(cache_type_k="f16", force=True)
        generating = running.submit(lambda: live.ask("/completion", **endless))
        until(lambda: live.slots()[0].get("next_token", [{"n_decoded": 0}])[0]["n_decoded"] > 4)
        starting = running.start(**prompt)
        until(lambda: live.slots()[1]["is_processing"])
        receipt = live.applied(cache_type_k="f32", force=True)
        assert [slot["fate"] for slot in receipt["slots"]] == ["dropped", "dropped"]
        ended = generating.result(WITHIN_S)
        assert ended.status == 503
        assert "dropped by a forced reconfigure" in ended.error["message"]
        assert starting.text == control


@pytest.mark.parametrize("name", ["q9_9", "", "F16"])
def test_an_unknown_cache_type_is_told_which_there_are(engine: LiveEngine, name: str) -> None:
    answer = engine.reconfigure(cache_type_k=name, force=True)
    assert (answer.status, answer.error["reason"]) == (400, "invalid_geometry")
    assert "cache_type_k has to be one of f32, f16," in answer.error["message"]
