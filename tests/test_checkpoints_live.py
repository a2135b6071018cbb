"""The budget of bytes over all slots' context checkpoints, on a model that cannot do without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from live_engine import LiveEngine, live_engine
from sandbox import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiny_models import TinyModels

MODEL = "qwen35-dense"
OPTIONS = (
    *("--override-kv", "qwen35.context_length=int:65536", "--cache-ram", "0", "--metrics"),
    *("--ubatch-size", "32", "--checkpoint-min-step", "16"),
)
ASK = {"temperature": 0, "n_predict": 4, "ignore_eos": True}
N_CHECKPOINTS = 3
"""How many of them the budget has room for."""


def fill(live: LiveEngine, slot: int, start: int, n: int = 200) -> int:
    """Have a slot process n tokens that begin like no other slot's, in turns of 50."""
    prompt = [start + i % 20 for i in range(n)]
    n_reused = 0
    for n_turn in range(50, n + 1, 50):
        n_reused = complete(live, slot, prompt[:n_turn])
    return n_reused


def complete(live: LiveEngine, slot: int, prompt: list[int]) -> int:
    """Return how many tokens of the prompt were reused."""
    answer = live.ask("/completion", **ASK, prompt=prompt, id_slot=slot).receipt
    n_reused: int = answer["timings"]["cache_n"]
    return n_reused


@pytest.fixture(scope="module")
def one(engine_path: Path, tiny: TinyModels) -> int:
    """Bytes of one checkpoint; a slot makes more of them than the budget has room for."""
    with live_engine(engine_path, tiny.model(MODEL), *OPTIONS) as live:
        fill(live, 0, 10)
        out = live.page(0, "page_out", "a").receipt
        assert out["n_checkpoints"] > N_CHECKPOINTS
        assert live.metric("ctx_checkpoint_bytes") == 0, "they left with the slot"
        size, rest = divmod(out["n_bytes_checkpoints"], out["n_checkpoints"])
        assert rest == 0
        return int(size)


@pytest.fixture
def live(engine_path: Path, tiny: TinyModels, one: int) -> Iterator[LiveEngine]:
    budget = ("--ctx-checkpoints-bytes", str(N_CHECKPOINTS * one + 1))
    with live_engine(engine_path, tiny.model(MODEL), *OPTIONS, *budget) as live:
        yield live


def counters(live: LiveEngine) -> Any:
    names = ("evicted", "skipped")
    return tuple(live.metric(f"ctx_checkpoints_{name}_budget_total") for name in names)


def test_one_slot_keeps_its_first_and_its_newest(live: LiveEngine, one: int) -> None:
    fill(live, 0, 10)
    assert live.metric("ctx_checkpoint_bytes") == N_CHECKPOINTS * one
    n_evicted, n_skipped = counters(live)
    assert n_evicted > 0
    assert n_skipped == 0
    until(lambda: live.log().count("giving up the context checkpoint") == n_evicted)
    # other last tokens: the newest checkpoint is there
    prompt = [10 + i % 20 for i in range(198)]
    assert complete(live, 0, [*prompt, 70, 71]) > 150
    # another middle: the first one is
    assert 0 < complete(live, 0, [*prompt[:60], *range(70, 90)]) <= 60


def test_the_budget_is_one_over_all_slots(live: LiveEngine, one: int) -> None:
    fill(live, 0, 10)
    fill(live, 1, 60)
    assert live.metric("ctx_checkpoint_bytes") == N_CHECKPOINTS * one
    held = [live.page(slot, "page_out", f"p{slot}").receipt["n_checkpoints"] for slot in (0, 1)]
    assert sum(held) == N_CHECKPOINTS
    assert all(held), "each keeps its first"


def test_it_is_applied_again_when_a_page_comes_in(live: LiveEngine, one: int) -> None:
    fill(live, 0, 10)
    out = live.page(0, "page_out", "a").receipt
    assert out["n_checkpoints"] == N_CHECKPOINTS
    fill(live, 1, 60)
    before = counters(live)[0]
    back = live.page(0, "page_in", "a").receipt
    assert live.metric("ctx_checkpoint_bytes") == N_CHECKPOINTS * one
    assert counters(live)[0] == before + N_CHECKPOINTS
    # what the answer says is what is there
    again = live.page(0, "page_out", "a").receipt
    assert again["n_checkpoints"] == back["n_checkpoints"] < out["n_checkpoints"]
    live.page(0, "page_in", "a")
    prompt = [10 + i % 20 for i in range(200)]
    n_reused = live.ask("/completion", **ASK, prompt=prompt, id_slot=0).receipt["timings"][
        "cache_n"
    ]
    assert n_reused > 0


def test_a_reconfigure_that_brings_states_back_keeps_to_it(live: LiveEngine, one: int) -> None:
    live.reconfigure(n_seq=3, n_ctx=6144)
    for slot in range(3):
        fill(live, slot, 10 + 30 * slot)
    live.reconfigure(n_seq=1)
    fill(live, 0, 100, 150)
    live.reconfigure(n_seq=3)
    fill(live, 0, 100, 200)
    assert live.metric("ctx_checkpoint_bytes") <= N_CHECKPOINTS * one


def test_where_not_even_one_fits_none_is_made(
    engine_path: Path, tiny: TinyModels, one: int
) -> None:
    budget = ("--ctx-checkpoints-bytes", str(one - 1))
    with live_engine(engine_path, tiny.model(MODEL), *OPTIONS, *budget) as live:
        fill(live, 0, 10)
        assert live.metric("ctx_checkpoint_bytes") == 0
        n_evicted, n_skipped = counters(live)
        assert n_evicted == 0
        assert n_skipped > 0
        assert complete(live, 0, [10 + i % 20 for i in range(150)]) == 0
        until(lambda: "past --ctx-checkpoints-bytes" in live.log())


def test_without_a_budget_the_number_alone_counts(engine_path: Path, tiny: TinyModels) -> None:
    options = ("--ctx-checkpoints-bytes", "0", "--ctx-checkpoints", "2")
    with live_engine(engine_path, tiny.model(MODEL), *OPTIONS, *options) as live:
        fill(live, 0, 10)
        assert live.page(0, "page_out", "a").receipt["n_checkpoints"] == 2
        assert counters(live) == (0, 0)
