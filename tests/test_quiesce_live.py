"""A quiet engine starts no request and loses none; all else of it goes on."""

from __future__ import annotations

import json
import signal
import socket
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from live_engine import Answer, LiveEngine, live_engine
from llamactl_validate.streams import streams
from sandbox import WITHIN_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TALE: dict[str, Any] = {
    "prompt": "Once upon a time there was a fox who lived beside a river. Every morning",
    "n_predict": 24,
    "temperature": 0,
    "ignore_eos": True,
}
LONG = TALE | {"n_predict": 100}
ENDLESS = TALE | {"n_predict": 1500}
CUT = {"error": {"code": 503, "message": "the server ended this request to become quiet"}}
NONE = {"n_processing": 0, "n_parked": 0, "n_waiting": 0, "n_cut": 0}


@pytest.fixture(scope="module")
def shared(engine_path: Path, model_path: Path) -> Iterator[LiveEngine]:
    with live_engine(engine_path, model_path, "--metrics") as live:
        yield live


@pytest.fixture
def engine(shared: LiveEngine) -> Iterator[LiveEngine]:
    """An engine that is not quiet, with empty slots, whatever was done to it before."""
    shared.reset()
    yield shared
    quiesce(shared, is_quiet=False)
    for page in shared.pages():
        shared.page(0, "page_drop", page["name"])


def quiesce(live: LiveEngine, **body: object) -> dict[str, Any]:
    """Ask for quiet; what was asked for holds, and how many requests it concerns."""
    told = live.ask("/quiesce", **body).receipt
    assert told.pop("is_quiet") is body["is_quiet"] is live.props()["is_quiet"]
    assert told.keys() == NONE.keys()
    return told


def until_waiting(live: LiveEngine, n: int) -> None:
    """Wait until so many requests wait for the end of the quiet."""
    until(lambda: quiesce(live, is_quiet=True)["n_waiting"] == n)


def last_error(live: LiveEngine, **body: object) -> dict[str, Any]:
    """Stream a completion that is ended from outside; return what it was ended with."""
    with live.tcp.stream("POST", "/completion", json=body | {"stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    error: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))
    error["error"].pop("type")
    return error


@contextmanager
def hanging(live: LiveEngine, **body: object) -> Iterator[None]:
    """A request whose client hangs up at the end of the block."""
    text = json.dumps(body)
    head = f"POST /completion HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(text)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), WITHIN_S) as client:
        client.sendall((head + text).encode())
        yield


def test_requests_start_in_the_order_in_which_they_came(engine: LiveEngine) -> None:
    ended: list[str] = []

    def ask(name: str) -> None:
        assert engine.ask("/completion", **TALE, id_slot=0).status == 200
        ended.append(name)

    with streams(engine) as beside:
        running = beside.start(**LONG, id_slot=0)
        running.reach(3)
        asked = [beside.submit(lambda: ask("before the quiet"))]
        until(lambda: engine.metric("requests_deferred") == 1)
        quiesce(engine, is_quiet=True)
        for n, name in enumerate(("first", "second", "third"), 2):
            asked.append(beside.submit(partial(ask, name)))
            until_waiting(engine, n)
        running.result()
        quiesce(engine, is_quiet=False)
        for each in asked:
            each.result(WITHIN_S)
    assert ended == ["before the quiet", "first", "second", "third"]


def test_a_request_of_many_choices_waits_or_goes_on_as_one(engine: LiveEngine) -> None:
    body = LONG | {"n": 2, "temperature": 1, "seed": 7}
    with streams(engine) as beside:
        running = beside.submit(lambda: engine.ask("/completion", **body))
        until(lambda: all(slot["is_processing"] for slot in engine.slots()))
        waiting = beside.submit(lambda: engine.ask("/completion", **body))
        until_waiting(engine, 1)
        assert len(running.result(WITHIN_S).body) == 2
        refused = engine.reconfigure(n_seq=1)
        assert (refused.status, waiting.done()) == (409, False), "its slots must not go"
        assert quiesce(engine, is_quiet=True) == NONE | {"n_waiting": 1}
        quiesce(engine, is_quiet=False)
        assert len(waiting.result(WITHIN_S).body) == 2


def test_a_request_whose_client_is_gone_never_starts(engine: LiveEngine) -> None:
    quiesce(engine, is_quiet=True)
    done = engine.metric("prompt_tokens_total")
    with (
        hanging(engine, **TALE),
        hanging(engine, **TALE, n=2),
        hanging(engine, **TALE, stream=True),
    ):
        until_waiting(engine, 3)
    until_waiting(engine, 0)
    quiesce(engine, is_quiet=False)
    assert engine.slots()[0]["n_prompt_tokens"] == 0
    assert engine.metric("prompt_tokens_total") == done


def test_a_cut_ends_requests_and_keeps_what_their_slots_hold(engine: LiveEngine) -> None:
    control = engine.ask("/completion", **LONG, id_slot=0).receipt["content"]
    engine.erase()
    with streams(engine) as beside:
        ended = beside.submit(lambda: last_error(engine, **ENDLESS, id_slot=0))
        until(lambda: engine.slots()[0]["n_prompt_tokens"] > 30)
        saved = beside.submit(lambda: engine.file(0, "save", "cut.state"))
        told = quiesce(engine, is_quiet=True, cut=True)
        assert told == NONE | {"n_cut": 1}
        assert ended.result(WITHIN_S) == CUT
        held = engine.slots()[0]["n_prompt_tokens"]
        assert held > 30
        assert saved.result(WITHIN_S).receipt["n_saved"] == held
        assert quiesce(engine, is_quiet=True, cut=True) == NONE
        assert engine.page(0, "page_out", "fox").receipt["n_tokens"] == held
        assert engine.page(1, "page_in", "fox").receipt["n_reusable"] == held
    quiesce(engine, is_quiet=False)
    again = engine.ask("/completion", **LONG, id_slot=1).receipt
    assert again["content"] == control
    assert again["timings"]["cache_n"] > 10


def test_a_cut_of_many_choices_and_of_what_waits_for_nothing(engine: LiveEngine) -> None:
    with streams(engine) as beside:
        running = beside.submit(lambda: engine.ask("/completion", **ENDLESS, n=2))
        until(lambda: all(slot["is_processing"] for slot in engine.slots()))
        waiting = beside.submit(lambda: engine.ask("/completion", **TALE))
        until(lambda: engine.metric("requests_deferred") == 1)
        assert quiesce(engine, is_quiet=True, cut=True) == NONE | {"n_cut": 2, "n_waiting": 1}
        assert running.result(WITHIN_S).status == 503
        assert not waiting.done()
        quiesce(engine, is_quiet=False)
        assert waiting.result(WITHIN_S).status == 200


def test_a_cut_while_a_long_batch_is_computed(engine: LiveEngine) -> None:
    long = {"prompt": [100] * 500, "n_predict": 1, "id_slot": 0}
    with streams(engine) as beside:
        running = beside.submit(lambda: engine.ask("/completion", **long))
        until(lambda: engine.slots()[0]["is_processing"])
        late = beside.submit(lambda: quiesce(engine, is_quiet=True, cut=True))
        assert late.result(WITHIN_S)["n_processing"] == 0
        ended = running.result(WITHIN_S)
        assert ended.status == (503 if late.result()["n_cut"] else 200)
    quiesce(engine, is_quiet=False)
    assert engine.ask("/completion", **long).status == 200


def test_a_parked_generation_is_cut_and_its_page_is_one_like_others(engine: LiveEngine) -> None:
    with streams(engine) as beside:
        for slot in (0, 1):
            beside.start(**TALE, id_slot=slot).result()
        first = beside.submit(lambda: last_error(engine, **ENDLESS, id_slot=0))
        second = beside.submit(lambda: last_error(engine, **ENDLESS, id_slot=1))
        until(lambda: all(slot["is_processing"] for slot in engine.slots()))
        (parked,) = engine.applied(n_seq=1)["parked"]
        assert parked["running"]
        assert quiesce(engine, is_quiet=True) == NONE | {"n_processing": 2, "n_parked": 1}
        assert quiesce(engine, is_quiet=True, cut=True) == NONE | {"n_cut": 2}
        assert first.result(WITHIN_S) == second.result(WITHIN_S) == CUT
    (page,) = engine.pages()
    assert (page["parked"], page["running"]) == (False, False)
    assert page["n_tokens"] == parked["tokens_held"]
    assert engine.props()["parked"] == []
    assert len(engine.slots()) == 1
    assert engine.spill(page["name"], filename="parked.state").status == 200
    assert engine.page(0, "page_in", page["name"]).receipt["n_tokens"] == page["n_tokens"]
    quiesce(engine, is_quiet=False)
    again = engine.ask("/completion", **TALE, id_slot=0).receipt
    assert again["timings"]["cache_n"] > 10


def test_a_reconfigure_goes_on_and_what_waits_starts_in_the_new_geometry(
    engine: LiveEngine,
) -> None:
    with streams(engine) as beside:
        running = beside.start(**LONG)
        running.reach(3)
        quiesce(engine, is_quiet=True)
        waiting = [beside.submit(lambda: engine.ask("/completion", **TALE)) for _ in range(4)]
        until_waiting(engine, 4)
        change = beside.submit(lambda: engine.applied(n_ctx=8192, n_seq=4))
        told = [quiesce(engine, is_quiet=True) for _ in range(5)]
        assert {each["n_waiting"] for each in told} == {4}
        change.result(WITHIN_S)
        running.result()
        assert quiesce(engine, is_quiet=True) == NONE | {"n_waiting": 4}
        quiesce(engine, is_quiet=False)
        assert {each.result(WITHIN_S).status for each in waiting} == {200}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "'is_quiet' is missing"),
        ({"is_quiet": 1}, "'is_quiet' has to be true or false"),
        ({"is_quiet": True, "cut": None}, "'cut' has to be true or false"),
        ({"is_quiet": False, "cut": True}, "'cut' goes with 'is_quiet': true only"),
        ({"is_quiet": True, "kill": True}, "unknown field 'kill'"),
        ([True], "the body has to be a JSON object"),
    ],
)
def test_what_is_no_request_changes_nothing(engine: LiveEngine, body: object, named: str) -> None:
    sent = engine.tcp.post("/quiesce", json=body)
    answer = Answer(sent.status_code, sent.json())
    assert (answer.status, answer.error["message"]) == (400, named)
    assert not engine.props()["is_quiet"]


def test_an_engine_that_begins_quiet_and_private(engine_path: Path, model_path: Path) -> None:
    with (
        live_engine(engine_path, model_path, "--quiesced", "--admin-private") as live,
        streams(live) as beside,
    ):
        assert live.props()["is_quiet"]
        assert live.tcp.get("/health").status_code == 200
        waiting = beside.submit(lambda: live.ask("/completion", **TALE))
        refused = live.ask("/quiesce", is_quiet=False)
        assert (refused.status, refused.error["type"]) == (403, "permission_error")

        def told(is_quiet: bool) -> dict[str, Any]:
            answer: dict[str, Any] = live.unix.post("/quiesce", json={"is_quiet": is_quiet}).json()
            return answer

        until(lambda: told(True)["n_waiting"] == 1)
        assert not waiting.done()
        assert told(False) == NONE | {"is_quiet": False, "n_processing": 1}, "it has started"
        assert waiting.result(WITHIN_S).status == 200


def test_what_waits_is_ended_by_a_shutdown(engine_path: Path, model_path: Path) -> None:
    with live_engine(engine_path, model_path) as live, streams(live) as beside:
        quiesce(live, is_quiet=True)
        waiting = [
            beside.submit(partial(live.ask, "/completion", **TALE, n=n, stream=n == 1))
            for n in (1, 2)
        ]
        until_waiting(live, 2)
        live.process.send_signal(signal.SIGTERM)
        for each in waiting:
            ended = each.result(WITHIN_S)
            assert (ended.status, ended.error["message"]) == (503, "the server is shutting down")
        assert live.process.wait(WITHIN_S) == 0


def test_sleep_and_quiet(engine_path: Path, model_path: Path) -> None:
    """One that sleeps is made quiet asleep; one that is quiet does not fall asleep."""
    with (
        live_engine(engine_path, model_path, "--sleep-idle-seconds", "1", "--metrics") as live,
        streams(live) as beside,
    ):
        live.ask("/completion", **TALE, id_slot=0)
        page = live.page(0, "page_out", "fox").receipt
        until(lambda: live.props()["is_sleeping"])
        assert quiesce(live, is_quiet=True) == quiesce(live, is_quiet=True, cut=True) == NONE
        assert quiesce(live, is_quiet=False) == quiesce(live, is_quiet=True) == NONE
        assert live.metric("quiet") == 1
        props = live.props()
        assert (props["is_sleeping"], props["n_weight_loads"]) == (True, 1)

        assert live.page(0, "page_in", "fox").receipt["n_tokens"] == page["n_tokens"]
        waiting = beside.submit(lambda: live.ask("/completion", **TALE, id_slot=0))
        until_waiting(live, 1)
        idle_until = time.monotonic() + 3
        until(lambda: time.monotonic() > idle_until)
        props = live.props()
        assert (props["is_sleeping"], props["n_weight_loads"]) == (False, 2)
        assert not waiting.done()
        quiesce(live, is_quiet=False)
        assert waiting.result(WITHIN_S).receipt["timings"]["cache_n"] > 10
        until(lambda: live.props()["is_sleeping"])
