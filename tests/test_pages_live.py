"""Pages of the real engine: a conversation leaves its slot for host memory and comes back."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live_engine import LiveEngine, live_engine
from llamactl_validate.conversations import TEXTS, Later, tokens_of
from llamactl_validate.streams import streams
from llamactl_validate.suites.pages import there_and_back
from page_conversations import refused
from sandbox import WITHIN_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiny_models import TinyModels

TALE = {
    "prompt": "Once upon a time there was a fox who lived beside a river. Every morning",
    "n_predict": 24,
    "temperature": 0,
    "ignore_eos": True,
}
CHECKPOINTS = ("--ubatch-size", "32", "--checkpoint-min-step", "16")
SAMPLED = {"temperature": 0.8, "seed": 3, "n_probs": 1, "ignore_eos": True}
N_WRITTEN = 200
KINDS = {
    "dense": ("llama-dense", ()),
    "dense, V transposed": ("llama-dense", ("--flash-attn", "off")),
    "dense, quantized": ("llama-dense", ("--cache-type-k", "q8_0", "--cache-type-v", "q4_0")),
    "mixture of experts": ("llama-moe", ()),
    "sliding window": ("gemma3-dense", CHECKPOINTS),
    "sliding window, whole": ("gemma3-dense", ("--swa-full", *CHECKPOINTS)),
    "recurrent": ("mamba2-dense", CHECKPOINTS),
    "hybrid, delta net": ("qwen35-dense", CHECKPOINTS),
    "hybrid, convolution": ("lfm2-dense", CHECKPOINTS),
    "unified": ("llama-dense", ("--kv-unified", "--no-cache-idle-slots")),
    "MTP": ("qwen35-mtp", ("--spec-type", "draft-mtp", *CHECKPOINTS)),
    "draft model": (
        "llama-dense",
        ("--spec-type", "draft-simple", "--model-draft", "tiny:llama-draft"),
    ),
}


@pytest.fixture(scope="module")
def shared(engine_path: Path, model_path: Path) -> Iterator[LiveEngine]:
    with live_engine(engine_path, model_path, "--metrics") as live:
        yield live


@pytest.fixture
def engine(shared: LiveEngine) -> LiveEngine:
    """An engine with empty slots, the first geometry and no page."""
    for page in shared.pages():
        shared.page(0, "page_drop", page["name"])
    shared.reset()
    return shared


# There and back


def test_a_page_says_what_it_holds_and_leaves_its_slot_free(engine: LiveEngine) -> None:
    engine.ask("/completion", **TALE, id_slot=1)
    held = engine.slots()[1]["n_prompt_tokens"]
    saved = engine.saved_state_bytes(1)
    out = engine.page(1, "page_out", "fox").receipt
    assert (out["id_slot"], out["page"], out["n_tokens"]) == (1, "fox", held)
    assert out["n_bytes"] == out["n_bytes_target"] == saved
    assert (out["n_bytes_draft"], out["n_bytes_spec"], out["n_checkpoints"]) == (0, 0, 0)
    assert out["ms"] > 0
    (page,) = engine.pages()
    assert {key: page[key] for key in ("name", "n_tokens", "n_bytes", "parked", "running")} == {
        "name": "fox",
        "n_tokens": held,
        "n_bytes": saved,
        "parked": False,
        "running": False,
    }
    assert engine.metric("page_store_bytes") == saved
    assert engine.metric("page_store_pages") == 1
    assert engine.slots()[1]["n_prompt_tokens"] == 0
    refused(engine.page(1, "page_out", "again"), 400, "empty_slot")


def test_a_page_with_a_home_is_parked_and_a_change_places_it_back(engine: LiveEngine) -> None:
    """As what a change has parked: it is not asked for, and is in its slot again."""
    control = engine.ask("/completion", **TALE, id_slot=1).receipt
    held = engine.slots()[1]["n_prompt_tokens"]
    assert engine.ask("/slots/1?action=page_out&page=guest", home=3).receipt["n_tokens"] == held
    (page,) = engine.pages()
    known = ("name", "parked", "running", "slot", "reason", "tokens_fit")
    assert [page[each] for each in known] == ["guest", True, False, 3, "n_seq", 0]
    (parked,) = (slot for slot in engine.slots() if slot.get("parked"))
    assert (parked["id"], parked["page"], parked["n_prompt_tokens"]) == (3, "guest", held)
    receipt = engine.applied(n_seq=4)
    assert receipt["parked"] == []
    (placed,) = (slot for slot in receipt["slots"] if slot["tokens"])
    assert (placed["slot"], placed["tokens"], placed["fate"]) == (3, held, "placed")
    assert engine.pages() == []
    again = engine.ask("/completion", **TALE, id_slot=3).receipt
    assert again["timings"]["cache_n"] == again["tokens_evaluated"] - 1
    assert again["content"] == control["content"]


def test_a_parked_page_is_a_page_like_others_until_then(engine: LiveEngine) -> None:
    """Put into a slot, dropped, or replaced by another of its name, it is parked no more."""
    for end in ("page_in", "page_drop", "page_out"):
        engine.ask("/completion", **TALE, id_slot=1)
        engine.ask("/slots/1?action=page_out&page=guest", home=0)
        engine.ask("/completion", **TALE | {"prompt": "Water begins to boil"}, id_slot=1)
        engine.page(1, end, "guest")
        assert not [slot for slot in engine.slots() if slot.get("parked")], end
        assert [page["parked"] for page in engine.pages()] == [False] * (end == "page_out"), end
        engine.erase()
    assert engine.applied(n_seq=4)["parked"] == []
    assert [page["name"] for page in engine.pages()] == ["guest"]


@pytest.mark.parametrize("home", [-1, 2**31, "1", None, 1.5, True])
def test_a_home_that_is_no_slot_is_refused(engine: LiveEngine, home: object) -> None:
    engine.ask("/completion", **TALE, id_slot=1)
    answer = engine.ask("/slots/1?action=page_out&page=guest", home=home)
    refused(answer, 400, "bad_body")
    assert engine.pages() == []
    assert engine.slots()[1]["n_prompt_tokens"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_and_a_file_are_as_good_as_the_slot_they_came_from(
    engine_path: Path, tiny: TinyModels, kind: str
) -> None:
    """Another conversation uses the slot meanwhile; the next tokens are the same bit for bit."""
    name, options = KINDS[kind]
    options = tiny.options(options)
    model = tiny.model(name)
    window = ("--override-kv", f"{name.split('-')[0]}.context_length=int:65536")

    def run(way: str) -> list[Later]:
        with live_engine(engine_path, model, *options, *window, "--cache-ram", "0") as live:
            text = tokens_of(live, TEXTS[0])
            return there_and_back(live, way, text, SAMPLED, N_WRITTEN)

    control = run("stay")
    assert all(later.n_reused > 0 for later in control)
    assert run("page") == control
    assert run("file") == control


def test_an_action_on_a_busy_slot_waits_for_it(engine: LiveEngine) -> None:
    with streams(engine) as running:
        stream = running.start(**TALE | {"n_predict": 40}, id_slot=1)
        stream.reach(2)
        out = engine.page(1, "page_out", "busy").receipt
        assert stream.result()["tokens_predicted"] == 40
        assert out["n_tokens"] == len(stream.chunks) + stream.result()["tokens_evaluated"] - 2


def test_who_waits_for_a_slot_is_served_after_each_other(engine: LiveEngine) -> None:
    """A verb takes no slot, so no release tells the next one that it is free."""
    engine.reconfigure(n_seq=1)

    def ask() -> int:
        return engine.ask("/completion", **TALE | {"n_predict": 4}).status

    with streams(engine) as running, ThreadPoolExecutor() as pool:
        stream = running.start(**TALE | {"n_predict": 60}, id_slot=0)
        stream.reach(2)
        waiting = [
            pool.submit(each)
            for each in (
                lambda: engine.page(0, "page_out", "a").status,
                ask,
                lambda: engine.file(0, "save", "b").status,
                ask,
                lambda: engine.tcp.post("/slots/0?action=erase").status_code,
                ask,
                lambda: engine.page(0, "page_out", "c").status,
            )
        ]
        statuses = [each.result(WITHIN_S) for each in waiting]
        assert stream.result()["tokens_predicted"] == 60
    # what a slot holds when its turn comes may be nothing
    assert set(statuses) <= {200, 400}
    assert [statuses[n] for n in (1, 2, 3, 4, 5)] == [200] * 5


# What is refused


def test_a_name_is_replaced_by_what_is_newer(engine: LiveEngine) -> None:
    engine.ask("/completion", **TALE, id_slot=0)
    first = engine.page(0, "page_out", "fox").receipt
    engine.ask("/completion", prompt="Water", n_predict=4, id_slot=0)
    second = engine.page(0, "page_out", "fox").receipt
    assert second["n_tokens"] < first["n_tokens"]
    assert [page["n_tokens"] for page in engine.pages()] == [second["n_tokens"]]
    assert engine.metric("page_store_bytes") == second["n_bytes"]


def test_the_ceiling_counts_pages_and_parked_states(engine_path: Path, model_path: Path) -> None:
    options = ("--page-ram-bytes", "2000000", "--metrics", "--parallel", "3")
    with live_engine(engine_path, model_path, *options) as live:
        for slot in (0, 1, 2):
            live.ask("/completion", **TALE | {"n_predict": 16}, id_slot=slot)
        first = live.page(0, "page_out", "first").receipt
        assert 600_000 < first["n_bytes"] < 1_000_000
        live.ask("/completion", **TALE | {"n_predict": 48}, id_slot=0)
        error = refused(live.page(0, "page_out", "second"), 503, "page_ceiling")
        assert error["details"]["bytes_ceiling"] == 2_000_000
        assert error["details"]["bytes_used"] == first["n_bytes"]
        assert error["details"]["bytes_needed"] > 2_000_000 - first["n_bytes"]
        assert live.slots()[0]["n_prompt_tokens"] > 0
        # in place of its predecessor it fits
        assert live.page(0, "page_out", "first").status == 200
        # a change that would park past the ceiling is refused, and nothing is touched
        answer = live.reconfigure(n_seq=1)
        assert (answer.status, answer.error["reason"]) == (409, "insufficient_memory")
        assert "--page-ram-bytes" in answer.error["message"]
        assert live.geometry()["n_seq"] == 3
        live.page(0, "page_drop", "first")
        assert len(live.reconfigure(n_seq=1).receipt["parked"]) == 2
        assert live.metric("page_store_bytes") == sum(page["n_bytes"] for page in live.pages())


def test_a_page_that_is_being_written_counts_until_its_writer_lets_go(
    engine: LiveEngine,
) -> None:
    """It goes into a slot meanwhile, and is written whole; then the next one finds room."""
    engine.reconfigure(n_ctx=3 * 4096, n_seq=3)
    long = {"prompt": "word " * 1500, "n_predict": 1, "temperature": 0}
    engine.ask("/completion", **long, id_slot=1)
    out = engine.page(1, "page_out", "long").receipt
    with streams(engine) as running, ThreadPoolExecutor() as pool:
        # beside it a spill takes its time
        neighbour = running.start(**TALE | {"n_predict": 300}, id_slot=0)
        neighbour.reach(2)
        spill = pool.submit(engine.spill, "long")
        until(lambda: (engine.slot_files / "long.page-staging").is_dir())
        back = engine.page(2, "page_in", "long").receipt
        assert not spill.done()
        assert engine.pages() == []
        assert engine.metric("page_store_bytes") == out["n_bytes"]
        assert spill.result(WITHIN_S).receipt["n_tokens"] == back["n_tokens"] == out["n_tokens"]
        assert engine.metric("page_store_bytes") == 0
    reused = [engine.ask("/completion", **long, id_slot=2).receipt["timings"]["cache_n"]]
    assert engine.file(1, "restore", "long").receipt["n_reusable"] == out["n_tokens"]
    reused += [engine.ask("/completion", **long, id_slot=1).receipt["timings"]["cache_n"]]
    assert reused == [out["n_tokens"] - 1] * 2


def test_many_pages_at_once_take_no_more_than_the_ceiling_and_one(
    engine_path: Path, model_path: Path
) -> None:
    n_seq = 4
    options = ("--metrics", "--parallel", str(n_seq), "--ctx-size", str(2048 * n_seq))
    with live_engine(engine_path, model_path, *options, "--cache-ram", "0") as live:
        text = {"prompt": "word " * 500, "n_predict": 1}
        for slot in range(n_seq):
            live.ask("/completion", **text, id_slot=slot)
        one = live.page(0, "page_out", "a").receipt["n_bytes"]
        live.page(0, "page_in", "a")
    ceiling = ("--page-ram-bytes", str(2 * one + one // 2))
    with live_engine(engine_path, model_path, *options, *ceiling, "--cache-ram", "0") as live:
        for slot in range(n_seq):
            live.ask("/completion", **text, id_slot=slot)
        status = Path(f"/proc/{live.process.pid}/status")

        def resident(field: str) -> int:
            return 1024 * int(status.read_text().split(f"{field}:")[1].split()[0])

        Path(f"/proc/{live.process.pid}/clear_refs").write_text("5")  # the peak counts from here
        base, outcomes = resident("VmRSS"), Counter[str]()

        def move(slot: int) -> None:
            for n in range(12):
                out = live.page(slot, "page_out", f"of-{slot if n % 3 else 0}")
                outcomes["out" if out.status == 200 else out.error["reason"]] += 1
                back = live.page(slot, "page_in", f"of-{slot if n % 3 else 0}")
                outcomes["in" if back.status == 200 else back.error["reason"]] += 1

        with ThreadPoolExecutor() as pool:
            for each in [pool.submit(move, slot) for slot in range(n_seq)]:
                each.result(WITHIN_S * 4)
        assert outcomes["out"] > 0  # how many meet the ceiling is the scheduler's choice
        assert set(outcomes) <= {"out", "in", "page_ceiling", "empty_slot", "unknown_page"}
        peak = resident("VmHWM") - base
        assert peak < 2 * one + one // 2 + one + one // 2, "and half a page for all else"
        assert live.metric("page_store_bytes") == sum(page["n_bytes"] for page in live.pages())


def test_a_private_engine_pages_on_its_unix_socket_only(
    engine_path: Path, model_path: Path
) -> None:
    with live_engine(engine_path, model_path, "--admin-private") as live:
        live.ask("/completion", **TALE, id_slot=0)
        answer = live.page(0, "page_out", "fox")
        assert (answer.status, answer.error["type"]) == (403, "permission_error")
        assert live.unix.post("/slots/0?action=page_out&page=fox").status_code == 200


def test_pages_outlive_sleep(engine_path: Path, model_path: Path) -> None:
    with live_engine(engine_path, model_path, "--sleep-idle-seconds", "1") as live:
        said = live.ask("/completion", **TALE, id_slot=0).receipt["content"]
        out = live.page(0, "page_out", "fox").receipt
        until(lambda: live.props()["is_sleeping"])
        assert [page["name"] for page in live.pages()] == ["fox"]
        assert live.props()["is_sleeping"], "a listing wakes nobody"
        back = live.page(1, "page_in", "fox").receipt
        assert back["n_reusable"] == out["n_tokens"]
        longer = TALE | {"prompt": f"{TALE['prompt']}{said} Then", "id_slot": 1}
        again = live.ask("/completion", **longer).receipt
        assert again["timings"]["cache_n"] == out["n_tokens"]


def test_a_page_of_another_kv_cache_is_refused_and_good_again_afterwards(
    engine: LiveEngine,
) -> None:
    engine.ask("/completion", **TALE, id_slot=0)
    held = engine.page(0, "page_out", "fox").receipt["n_tokens"]
    engine.reconfigure(cache_type_k="q8_0", force=True)
    error = refused(engine.page(0, "page_in", "fox"), 409, "page_mismatch")
    assert error["details"]["fields"] == [
        {"field": "cache_type_k", "page": "f16", "server": "q8_0"}
    ]
    assert "made for 'f16', there is 'q8_0'" in error["message"]
    assert [page["name"] for page in engine.pages()] == ["fox"]
    engine.reconfigure(cache_type_k="f16", force=True)
    assert engine.page(0, "page_in", "fox").receipt["n_reusable"] == held
