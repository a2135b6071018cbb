"""`/props` tells who watches the engine whether it computes, and whether it has anything to do."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from live_engine import PATIENCE_S, LiveEngine, live_engine
from sandbox import until

if TYPE_CHECKING:
    from pathlib import Path

PROMPT_TOKENS = 1500
UBATCH = 32


def progress(live: LiveEngine) -> dict[str, Any]:
    """Return what /props says of it."""
    found: dict[str, Any] = live.tcp.get("/props").json()["compute_progress"]
    assert found.keys() == {"n_ubatches", "is_working"}
    return found


def test_a_batch_that_takes_long_is_seen_to_move(engine_path: Path, model_path: Path) -> None:
    """One batch of 1500 tokens: nothing else of the server changes until it is through."""
    with live_engine(engine_path, model_path, "--ubatch-size", str(UBATCH)) as live:
        until(lambda: not progress(live)["is_working"])
        before = progress(live)["n_ubatches"]
        prompt = {"prompt": [100] * PROMPT_TOKENS, "n_predict": 1}
        asked = threading.Thread(
            target=live.tcp.post, args=("/completion",), kwargs={"json": prompt}
        )
        asked.start()
        seen: set[int] = set()

        def ended() -> bool:
            found = progress(live)
            if found["is_working"]:
                seen.add(found["n_ubatches"] - before)
            return not asked.is_alive()

        until(ended, within_s=PATIENCE_S)
        asked.join()
        until(lambda: not progress(live)["is_working"])
        computed = progress(live)["n_ubatches"] - before
    assert computed >= PROMPT_TOKENS // UBATCH
    assert len(seen - {0, computed}) >= 5, seen


def test_a_sleeping_engine_answers_and_does_nothing(engine_path: Path, model_path: Path) -> None:
    with live_engine(engine_path, model_path, "--sleep-idle-seconds", "1") as live:
        until(lambda: live.props()["is_sleeping"])
        assert not progress(live)["is_working"]
        computed = progress(live)["n_ubatches"]
        live.tcp.post("/completion", json={"prompt": "hello", "n_predict": 2}).raise_for_status()
        assert progress(live)["n_ubatches"] > computed
        assert live.props()["n_weight_loads"] == 2
