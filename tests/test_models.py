"""What a request may say, and what the answer is when it says something else."""

from __future__ import annotations

from typing import Any

import pytest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineRequest, Receipt, ReconfigureRequest
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
    assert ReconfigureRequest.parse({"n_ctx": 1, "n_seq": 1}).n_ctx == 1


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


def test_our_own_shapes_are_frozen() -> None:
    request = ReconfigureRequest(n_ctx=1)
    with pytest.raises(ValidationError):
        request.n_ctx = 2
