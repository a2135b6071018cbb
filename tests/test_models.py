"""What a request may say, and what the answer is when it says something else."""

from __future__ import annotations

from typing import Any

import pytest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import (
    EngineRequest,
    FileReceipt,
    Operation,
    PageFileRequest,
    PageReceipt,
    PageSpillRequest,
    Receipt,
    ReconfigureRequest,
)
from pydantic import ValidationError

RECEIPT = {
    "outcome": "applied",
    "previous": {"n_ctx": 16384, "n_seq": 2},
    "geometry": {"n_ctx": 131072, "n_seq": 4, "n_ctx_slot": 8192},
    "pause_ms": 79.5,
    "phases_ms": {"a_phase_of_tomorrow": 1.5},
    "from_a_newer_engine": [1, 2],
}


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        ({"n_ctx": 0}, "invalid_geometry", "n_ctx"),
        ({"n_ctx": 255}, "invalid_geometry", "n_ctx"),
        ({"n_ctx": -1}, "invalid_geometry", "n_ctx"),
        ({"n_ctx": 10**12}, "invalid_geometry", "n_ctx"),
        ({"n_ctx": 2**31}, "invalid_geometry", "n_ctx"),
        ({"n_ctx": "big"}, "invalid_request", "n_ctx"),
        ({"n_ctx": "16384"}, "invalid_request", "n_ctx"),
        ({"n_ctx": 16384.5}, "invalid_request", "n_ctx"),
        ({"n_seq": 0}, "invalid_geometry", "n_seq"),
        ({"n_seq": 257}, "invalid_geometry", "n_seq"),
        ({"n_seq": True}, "invalid_request", "n_seq"),
        ({"n_cxt": 16384}, "invalid_request", "n_cxt"),
    ],
)
def test_a_bad_geometry_is_named(given: dict[str, Any], code: str, field: str) -> None:
    with pytest.raises(LlamactlError) as caught:
        ReconfigureRequest.parse(given)
    assert caught.value.code == code
    assert caught.value.message.startswith(f"{field}: ")
    assert caught.value.details["fields"][0]["field"] == field


def test_the_bounds_themselves_are_good() -> None:
    assert ReconfigureRequest.parse({"n_ctx": 2**31 - 1, "n_seq": 256}).n_seq == 256
    assert ReconfigureRequest.parse({"n_ctx": 256, "n_seq": 1}).n_ctx == 256


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({}, "invalid_request"),
        ({"model": "model.gguf"}, "invalid_request"),
        ({"model": "/m\0.gguf"}, "invalid_request"),
        ({"model": "/m", "port": 0}, "invalid_request"),
        ({"model": "/m", "port": 65536}, "invalid_request"),
        ({"model": "/m", "extra_args": ["--port", "1"]}, "owned_argument"),
        ({"model": "/m", "extra_args": ["-c=1"]}, "owned_argument"),
        ({"model": "/m", "extra_args": ["--ctx_size", "1"]}, "owned_argument"),
        ({"model": "/m", "extra_args": ["--reuse-port"]}, "owned_argument"),
        ({"model": "/m", "extra_args": ["--version"]}, "invalid_request"),
        ({"model": "/m", "extra_args": ["--print_args_json"]}, "invalid_request"),
        ({"model": "/m", "extra_args": ["--api-key", "hunter2"]}, "owned_argument"),
    ],
)
def test_a_bad_engine_is_named(given: dict[str, Any], code: str) -> None:
    with pytest.raises(LlamactlError) as caught:
        EngineRequest.parse(given)
    assert caught.value.code == code
    assert "hunter2" not in str(caught.value.details) + caught.value.message


def test_free_arguments_pass_in_order() -> None:
    args = ["--threads", "2", "--jinja"]
    assert EngineRequest.parse({"model": "/m", "extra_args": args}).extra_args == tuple(args)


def test_a_receipt_is_kept_as_it_came() -> None:
    receipt = Receipt.model_validate(RECEIPT)
    assert receipt.phases_ms == {"a_phase_of_tomorrow": 1.5}
    assert receipt.model_dump(mode="json")["from_a_newer_engine"] == [1, 2]


HELD: dict[str, Any] = {"id_slot": 0, "n_tokens": 33, "n_bytes": 761464, "n_checkpoints": 0}
SPILLED = HELD | {"page": "x", "filename": "b", "n_written": 762016, "dropped": False, "ms": 4.6}
SAVED = HELD | {"filename": "b", "n_written": 762016, "timings": {"save_ms": 4.6, "new": 1}}
LOST: dict[str, Any] = {"file": "b.ckpt", "why": "it is missing", "new": 1}
RESTORED = HELD | {"filename": "b", "n_read": 9, "n_reusable": 0, "lost": [LOST]}
RESTORED |= {"timings": {"restore_ms": 5.2}}


@pytest.mark.parametrize(
    ("said", "shape"),
    [
        (RECEIPT, Receipt),
        (HELD | {"page": "x", "ms": 1.5}, PageReceipt),
        (SPILLED, FileReceipt),
        (SAVED, FileReceipt),
        (RESTORED, FileReceipt),
        (RESTORED | {"lost": []}, FileReceipt),
    ],
)
def test_a_result_crosses_the_wire_as_what_it_is(said: dict[str, Any], shape: type[Any]) -> None:
    asked = {"id": "o", "kind": "page_spill", "state": "succeeded", "requested_by": "me"}
    asked |= {"requested_at": "2026-01-01T00:00:00Z"}
    sent = Operation.model_validate(asked | {"result": said}).model_dump_json()
    result: Any = Operation.model_validate_json(sent).result
    assert type(result) is shape
    kept = result.model_dump(mode="json", exclude_none=True)
    assert {key: kept[key] for key in said} == said


@pytest.mark.parametrize(("said", "took_ms"), [(SPILLED, 4.6), (RESTORED, 5.2), (HELD, None)])
def test_a_verb_with_files_says_where_it_likes_how_long_it_took(
    said: dict[str, Any], took_ms: float | None
) -> None:
    assert FileReceipt.model_validate(said | {"filename": "b"}).took_ms == took_ms


def test_nothing_is_dropped_by_a_word_that_means_it() -> None:
    for drop in ("yes", 1, None):
        with pytest.raises(LlamactlError) as caught:
            PageSpillRequest.parse({"name": "fox", "drop": drop})
        assert caught.value.code == "invalid_request"
    assert not PageSpillRequest.parse({"name": "fox"}).drop
    with pytest.raises(LlamactlError):
        PageFileRequest.parse({"filename": "fox", "slot": 0, "drop": True})


def test_our_own_shapes_are_frozen() -> None:
    request = ReconfigureRequest(n_ctx=256)
    with pytest.raises(ValidationError):
        request.n_ctx = 2
