"""Where a reconfigure meets what else moves a KV cache: shifts, reuse, the prompt cache, RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from live_engine import live_engine
from llamactl_validate.streams import streams
from tiny_models import LONG_ROPE_CELLS

if TYPE_CHECKING:
    from pathlib import Path

    from tiny_models import TinyModels

WINDOW = 512
SAMPLED = {"temperature": 0.9, "seed": 5, "ignore_eos": True, "n_probs": 1}
TALE = "The lighthouse keeper walked down to the shore and looked at the sea, which was grey. "
OTHER = "Water begins to boil when the pressure of its vapour is as high as that of the air. "


def long_window(architecture: str) -> tuple[str, ...]:
    """Return the options that lift the tiny models' training context."""
    return ("--override-kv", f"{architecture}.context_length=int:65536")


def written(answer: Any) -> list[tuple[int, float]]:
    """Return what was written, bit for bit."""
    return [(each["id"], each["logprob"]) for each in answer["completion_probabilities"]]


def test_a_context_that_shifts_goes_on_shifting(engine_path: Path, tiny: TinyModels) -> None:
    """Half of the window is thrown away again and again; a shift may be pending at any change."""
    options = (*long_window("llama"), "--context-shift", "--ctx-size", str(WINDOW * 2))
    body = SAMPLED | {"temperature": 0, "prompt": TALE, "n_predict": 6 * WINDOW, "id_slot": 0}
    with live_engine(engine_path, tiny.model("llama-dense"), *options) as live:
        control = live.ask("/completion", **body).receipt
        assert control["truncated"]
        live.erase()
        with streams(live) as running:
            answer = running.submit(lambda: live.ask("/completion", **body).receipt)
            n_changes = 0
            while not answer.done():
                n_seq = 2 + n_changes % 3
                n_changes += live.reconfigure(n_ctx=WINDOW * n_seq, n_seq=n_seq).status == 200
            changed = answer.result()
        assert n_changes > 20
        assert len(written(control)) == 6 * WINDOW
        assert changed["tokens_predicted"] == control["tokens_predicted"]
        # a shift leaves holes, which a move closes: the same sums in another order
        for (token, logprob), (expected, value) in zip(
            written(changed), written(control), strict=True
        ):
            assert token == expected
            assert logprob == pytest.approx(value, abs=1e-3)


def test_chunks_are_reused_as_before(engine_path: Path, tiny: TinyModels) -> None:
    """A prompt that lost its beginning finds the rest in the cache and shifts it."""
    options = (*long_window("llama"), "--cache-reuse", "16", "--cache-ram", "0")
    rest = [20 + n * n % 97 for n in range(200)]
    whole = SAMPLED | {"prompt": [*range(30, 70), *rest], "n_predict": 8, "id_slot": 1}
    cut = whole | {"prompt": [*range(30, 40), *rest]}
    with live_engine(engine_path, tiny.model("llama-dense"), *options) as live:

        def reused(*, change: bool) -> Any:
            live.erase()
            live.ask("/completion", **whole)
            if change:
                live.applied(n_ctx=12288, n_seq=3)
            return live.ask("/completion", **cut).receipt

        control, changed = reused(change=False), reused(change=True)
        assert changed["timings"]["cache_n"] == control["timings"]["cache_n"] > 200
        assert written(changed) == written(control)


def test_the_prompt_cache_is_good_for_every_geometry(engine_path: Path, tiny: TinyModels) -> None:
    """What was saved to it under one stream count is loaded under another, or after a change."""
    options = (*long_window("qwen35"), "--parallel", "1", "--no-cache-idle-slots")
    body = SAMPLED | {"n_predict": 8, "id_slot": 0}
    with live_engine(engine_path, tiny.model("qwen35-dense"), *options) as live:
        live.ask("/completion", **body, prompt=TALE * 4)
        live.ask("/completion", **body, prompt=OTHER * 4)
        control = live.ask("/completion", **body, prompt=TALE * 4).receipt["timings"]["cache_n"]
        assert control > 60
        live.ask("/completion", **body, prompt=OTHER * 4)
        live.applied(n_ctx=16384, n_seq=3)
        again = live.ask("/completion", **body, prompt=TALE * 4).receipt["timings"]["cache_n"]
        assert again == control


def test_a_change_across_a_switch_of_rope_factors_is_refused_while_anything_is_held(
    engine_path: Path, tiny: TinyModels
) -> None:
    options = (*long_window("llama"), "--cache-ram", "0")
    below = {"n_ctx": 2 * LONG_ROPE_CELLS, "n_seq": 2}
    above = {"n_ctx": 3 * LONG_ROPE_CELLS, "n_seq": 2}
    body = SAMPLED | {"prompt": TALE, "n_predict": 16, "id_slot": 0}
    with live_engine(engine_path, tiny.model("llama-longrope"), *options) as live:
        live.applied(**below)
        short = live.ask("/completion", **body).receipt
        before = live.props()
        refused = live.reconfigure(**above)
        assert (refused.status, refused.error["reason"]) == (409, "rope_scaling_change")
        assert refused.error["details"]["n_ctx_seq_switch"] == LONG_ROPE_CELLS
        assert live.props() == before
        # other changes on the same side are taken
        assert live.applied(n_ctx=LONG_ROPE_CELLS, n_seq=2)["slots"][0]["fate"] == "resident"
        live.erase()
        live.applied(**above)
        long = live.ask("/completion", **body).receipt
        assert written(long) != written(short), "the factors make a difference"
        dropped = live.applied(**below, force=True)
        assert [slot["fate"] for slot in dropped["slots"]] == ["dropped"]
        assert written(live.ask("/completion", **body).receipt) == written(short)
