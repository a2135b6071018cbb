"""When a second `up` is the first one again."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from llamactl_supervisor.models import EngineRequest, Override, UpRequest
from llamactl_supervisor.repeat import Conflict, Repeated, compare

SPEC = EngineRequest(model="/m.gguf", n_ctx=10000, n_seq=3)
RUNNING = UpRequest(spec=SPEC, engine_path="/bin/llama-server")
LIVE = Override(
    n_ctx=131072, n_seq=4, kv_unified=None, by="me", at=datetime(2026, 1, 1, tzinfo=UTC)
)


def asked(**fields: object) -> UpRequest:
    return RUNNING.model_copy(update={"spec": SPEC.model_copy(update=fields)})


def test_the_same_request_is_no_change() -> None:
    assert compare(RUNNING, None, asked()) == Repeated()


def test_what_was_set_live_counts_as_asked_for() -> None:
    assert compare(RUNNING, LIVE, asked()) == Repeated()
    assert compare(RUNNING, LIVE, asked(n_ctx=131072, n_seq=4)) == Repeated()


@pytest.mark.parametrize(
    ("field", "value"), [("n_ctx", 8192), ("n_seq", 1), ("port", 9), ("extra_args", ("--jinja",))]
)
def test_every_other_request_is_a_conflict(field: str, value: object) -> None:
    verdict = compare(RUNNING, None, asked(**{field: value}))
    assert verdict == Conflict({field: (getattr(SPEC, field), value)})


def test_where_the_geometry_is_to_be_exact_only_the_live_one_counts() -> None:
    verdict = compare(RUNNING, LIVE, asked(), exact=True)
    assert verdict == Conflict({"n_ctx": (131072, 10000), "n_seq": (4, 3)})
    assert compare(RUNNING, LIVE, asked(n_ctx=131072, n_seq=4), exact=True) == Repeated()


def test_another_binary_is_a_conflict() -> None:
    other = RUNNING.model_copy(update={"engine_path": "/other"})
    assert compare(RUNNING, None, other) == Conflict(
        {"engine_path": ("/bin/llama-server", "/other")}
    )
