"""`POST /reconfigure` of the real engine, without a daemon: receipts, refusals and what goes on."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from live_engine import N_CTX, N_SEQ, LiveEngine, live_engine
from sandbox import WITHIN_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

GROW = {"n_ctx": 4 * N_CTX, "n_seq": 2 * N_SEQ}
SHRINK = {"n_ctx": N_CTX // 2, "n_seq": N_SEQ}
PROMPTS = ("The lighthouse keeper walked down to the shore and", "Water begins to boil when")
CONVERSATION = {
    "prompt": "Once upon a time there was a fox who lived beside a river. Every morning",
    "n_predict": 24,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def shared(engine_path: Path, model_path: Path) -> Iterator[LiveEngine]:
    with live_engine(engine_path, model_path) as live:
        yield live


@pytest.fixture
def engine(shared: LiveEngine) -> LiveEngine:
    """An engine with empty slots and the first geometry, whatever was done to it before."""
    shared.reset()
    return shared


def short(live: LiveEngine, slot: int, n_predict: int = 4) -> Any:
    """Have a short conversation in this slot."""
    body = CONVERSATION | {"id_slot": slot, "n_predict": n_predict}
    return live.ask("/completion", **body).receipt


# What a receipt says


def test_a_receipt_accounts_for_the_pause_and_for_every_byte_held(engine: LiveEngine) -> None:
    short(engine, 0)
    short(engine, 1, n_predict=9)
    saved_bytes = [engine.saved_state_bytes(slot) for slot in (0, 1)]
    tokens = [slot["n_prompt_tokens"] for slot in engine.slots()]
    before = engine.geometry()
    receipt = engine.applied(**GROW)
    assert receipt["previous"] == before
    assert receipt["geometry"] == before | {
        "n_ctx": 16384,
        "n_seq": 4,
        "n_ctx_seq": 4096,
        "n_ctx_slot": 4096,
    }
    phases = receipt["phases_ms"]
    assert list(phases) == ["sync", "page_out", "page_in", "swap", "first_decode_setup"]
    assert all(ms >= 0 for ms in phases.values())
    assert sum(phases.values()) == pytest.approx(receipt["pause_ms"], abs=1e-6)
    assert receipt["pause_ms"] > 0
    assert receipt["outside_pause_ms"]["build"] > 0
    assert [slot["fate"] for slot in receipt["slots"]] == ["resident", "resident"]
    assert [slot["slot"] for slot in receipt["slots"]] == [0, 1]
    assert [slot["tokens"] for slot in receipt["slots"]] == tokens
    assert receipt["tokens_held"] == sum(tokens)
    assert receipt["bytes_held"] == sum(saved_bytes)
    assert receipt["bytes_held"] // receipt["tokens_held"] in range(23040, 23200)
    assert receipt["parked"] == []
    assert receipt["n_weight_loads"] == 1
    assert engine.props()["last_reconfigure"] == receipt


def test_the_training_context_bounds_what_a_slot_may_use(engine: LiveEngine) -> None:
    geometry = engine.applied(n_ctx=131072, n_seq=4)["geometry"]
    assert (geometry["n_ctx_seq"], geometry["n_ctx_slot"]) == (32768, 8192)


def test_sizes_are_rounded_up_to_what_libllama_makes_of_them(engine: LiveEngine) -> None:
    geometry = engine.applied(n_ctx=10000, n_seq=3)["geometry"]
    assert (geometry["n_ctx"], geometry["n_ctx_seq"]) == (10752, 3584)


@pytest.mark.parametrize("body", ["{}", json.dumps({"n_ctx": N_CTX - 100, "n_seq": N_SEQ})])
def test_a_change_to_what_there_is_touches_nothing(engine: LiveEngine, body: str) -> None:
    before = engine.props()
    receipt = engine.reconfigure_raw(body).receipt
    assert receipt["outcome"] == "unchanged"
    assert receipt["previous"] == receipt["geometry"] == before["context_geometry"]
    assert receipt["pause_ms"] == 0
    assert engine.props() == before


def test_a_dry_run_says_what_it_needs_and_touches_nothing(engine: LiveEngine) -> None:
    short(engine, 1)
    before, slots = engine.props(), engine.slots()
    receipt = engine.reconfigure(**GROW, dry_run=True).receipt
    assert receipt["outcome"] == "planned"
    assert receipt["previous"] == before["context_geometry"]
    assert receipt["geometry"]["n_ctx"] == GROW["n_ctx"]
    assert receipt["pause_ms"] == 0
    assert [slot["slot"] for slot in receipt["slots"]] == [1]
    kv_bytes = GROW["n_ctx"] * 23040
    assert kv_bytes < sum(receipt["bytes_needed"].values()) < 2 * kv_bytes
    assert engine.props() == before
    assert engine.slots() == slots
    assert engine.applied(**GROW)["bytes_needed"] == receipt["bytes_needed"]


def test_everything_that_tells_a_size_follows(engine: LiveEngine) -> None:
    loaded = engine.props()
    engine.applied(**GROW)
    props = engine.props()
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert [(slot["id"], slot["n_ctx"]) for slot in engine.slots()] == [
        (0, 4096),
        (1, 4096),
        (2, 4096),
        (3, 4096),
    ]
    models = engine.tcp.get("/v1/models").json()
    assert models["data"][0]["meta"]["n_ctx"] == 4096
    assert props["n_weight_loads"] == 1
    assert props["instance_id"] == loaded["instance_id"]


# What is refused


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_cannot_fit_is_not_even_begun(engine: LiveEngine, *, dry_run: bool) -> None:
    """The bookkeeping of so many cells alone is 5 GB, which a build would touch."""
    process = psutil.Process(engine.process.pid)
    before = process.memory_info().rss
    answer = engine.reconfigure(n_ctx=100_000_000, dry_run=dry_run)
    assert (answer.status, answer.error["reason"]) == (409, "insufficient_memory")
    details = answer.error["details"]
    assert details["bytes_needed"] > 100_000_000 * 23040 > details["bytes_available"]
    assert "MiB needed" in answer.error["message"]
    peak_kb = int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[0])
    assert peak_kb * 1024 < before + 2**30


def test_a_bad_request_is_counted_and_not_repeated_at_length(
    engine_path: Path, model_path: Path
) -> None:
    with live_engine(engine_path, model_path, "--metrics") as live:
        for body in ("[]", json.dumps({"n_ctx": "x" * 10**6}), '{"cache_type_k": "q9"}'):
            answer = live.reconfigure_raw(body)
            assert (answer.status, len(answer.error["message"]) < 300) == (400, True)
        assert "llamacpp:reconfigure_refused_total 3\n" in live.tcp.get("/metrics").text


def test_a_private_engine_is_changed_through_its_unix_socket_only(
    engine_path: Path, model_path: Path
) -> None:
    with live_engine(engine_path, model_path, "--admin-private") as live:
        refused = live.reconfigure(**GROW)
        assert refused.status == 403
        assert refused.error["type"] == "permission_error"
        assert "unix socket" in refused.error["message"]
        assert live.geometry()["n_ctx"] == N_CTX
        allowed = live.unix.post("/reconfigure", json=GROW)
        assert (allowed.status_code, allowed.json()["outcome"]) == (200, "applied")
        assert live.geometry()["n_seq"] == GROW["n_seq"]
        assert live.tcp.get("/slots").status_code == 200


# Callers that hang up, and the end


def hang_up(live: LiveEngine, **fields: object) -> None:
    """Ask for a change and close the connection without reading the answer."""
    body = json.dumps(fields)
    head = f"POST /reconfigure HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), WITHIN_S) as caller:
        caller.sendall((head + body).encode())


def test_a_caller_that_hangs_up_does_not_undo_the_change(engine: LiveEngine) -> None:
    hang_up(engine, **GROW)
    until(lambda: engine.geometry()["n_seq"] == GROW["n_seq"])
    last = engine.props()["last_reconfigure"]
    assert last["outcome"] == "applied"
    assert last["geometry"]["n_ctx"] == GROW["n_ctx"]


def test_a_caller_that_hangs_up_before_the_safe_point_does_not_either(engine: LiveEngine) -> None:
    """The change waits behind a long batch; the server looks for lost callers meanwhile."""
    prompt = "word " * 600
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.ask, "/completion", prompt=prompt, n_predict=1)
        until(lambda: any(slot["is_processing"] for slot in engine.slots()))
        hang_up(engine, **GROW)
        assert answer.result(WITHIN_S).status == 200
    until(lambda: engine.geometry()["n_seq"] == GROW["n_seq"])
    assert engine.props()["last_reconfigure"]["outcome"] == "applied"


ENDLESS = {"prompt": PROMPTS[0], "n_predict": -1, "ignore_eos": True, "stream": True}


def read_to_the_end(live: LiveEngine, started: threading.Semaphore) -> str:
    """Stream an answer without an end; return what came last, however the stream broke off."""
    last = ""
    with (
        contextlib.suppress(httpx.RemoteProtocolError),
        live.tcp.stream("POST", "/completion", json=ENDLESS) as answer,
    ):
        for n, line in enumerate(filter(None, answer.iter_lines())):
            last = line
            if n == 4:
                started.release()
    return last


def terminate_under_streams(live: LiveEngine, n_streams: int) -> tuple[int, list[str]]:
    """Send TERM while all streams run; return the exit status and the last lines."""
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(n_streams) as pool:
        streams = [pool.submit(read_to_the_end, live, started) for _ in range(n_streams)]
        for _ in streams:
            assert started.acquire(timeout=WITHIN_S)
        live.process.send_signal(signal.SIGTERM)
        status = live.process.wait(WITHIN_S)
        return status, [stream.result(WITHIN_S) for stream in streams]


def test_terminate_ends_the_process_under_open_streams(engine_path: Path, model_path: Path) -> None:
    """Unpatched it goes on for as long as a client streams: minutes here."""
    with live_engine(engine_path, model_path) as live:
        live.applied(**GROW)
        status, _ = terminate_under_streams(live, n_streams=4)
        assert status == 0


def test_terminate_ends_open_streams_with_an_error(engine_path: Path, model_path: Path) -> None:
    for _ in range(3):
        with live_engine(engine_path, model_path) as live:
            _, (end,) = terminate_under_streams(live, n_streams=1)
            error = json.loads(end.removeprefix("data: ")).get("error", {})
            assert error.get("message") == "the server is shutting down"
            assert error["code"] == 503
