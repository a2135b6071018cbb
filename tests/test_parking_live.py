"""What a smaller geometry has no place for is parked whole, named, and placed back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from live_engine import N_CTX, N_SEQ, LiveEngine, live_engine
from llamactl_validate.streams import streaming_socket, streams
from sandbox import WITHIN_S, until

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


# Generations


def controls(engine: LiveEngine) -> list[str]:
    """Return what each prompt alone and undisturbed is answered with."""
    return [engine.generate(LONG | {"prompt": [prompt]}).texts[0] for prompt in PROMPTS]


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
