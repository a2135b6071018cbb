"""A reconfigure through llama-server's router: the call names a model and reaches its process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from live_engine import LiveEngine, live_engine
from sandbox import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ASK = {"model": "smol", "prompt": "Once upon a time", "n_predict": 4, "temperature": 0}


@pytest.fixture(scope="module")
def router(
    engine_path: Path, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveEngine]:
    models = tmp_path_factory.mktemp("models")
    (models / "smol.gguf").symlink_to(model_path)
    with live_engine(engine_path, None, "--models-dir", str(models)) as live:
        assert live.ask("/completion", **ASK).status == 200
        yield live


def n_ctx_of_model(live: LiveEngine) -> Any:
    """Return what the router tells of the model's context."""
    (model,) = live.tcp.get("/v1/models").json()["data"]
    return model["meta"]["n_ctx"]


def test_the_model_that_is_named_is_changed_and_the_router_tells_its_new_size(
    router: LiveEngine,
) -> None:
    before = n_ctx_of_model(router)
    receipt = router.reconfigure(model="smol", n_ctx=16384, n_seq=4).receipt
    assert (receipt["outcome"], receipt["n_weight_loads"]) == ("applied", 1)
    until(lambda: n_ctx_of_model(router) != before)
    assert n_ctx_of_model(router) == 4096
    props = router.tcp.get("/props", params={"model": "smol"}).json()
    assert props["context_geometry"] == receipt["geometry"]
    assert router.tcp.get("/pages", params={"model": "smol"}).json() == []
    assert router.ask("/completion", **ASK).status == 200


def test_a_refusal_comes_through_as_the_model_gave_it(router: LiveEngine) -> None:
    refused = router.reconfigure(model="smol", n_ctx=0)
    assert (refused.status, refused.error["reason"]) == (400, "invalid_geometry")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n_seq": 2}, "model name is missing"),
        ({"model": "other", "n_seq": 2}, "'other' not found"),
    ],
)
def test_a_call_that_names_no_model_of_the_router_changes_nothing(
    router: LiveEngine, fields: dict[str, object], said: str
) -> None:
    refused = router.reconfigure(**fields)
    assert refused.status == 400
    assert said in refused.error["message"]
