"""`POST /reconfigure` on every kind of memory, speculation and adapter that llama.cpp has."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from live_engine import N_CTX, N_SEQ, TRIES, Json, LiveEngine, live_engine
from llamactl_validate.conversations import TEXTS, tokens_of
from llamactl_validate.suites import identity
from sandbox import WITHIN_S, until
from tiny_models import TINY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tiny_models import TinyModels

    Launch = Callable[..., AbstractContextManager[LiveEngine]]

GROW = {"n_ctx": 4 * N_CTX, "n_seq": 2 * N_SEQ}
SHRINK = {"n_ctx": N_CTX // 2, "n_seq": N_SEQ}
OTHER = {"n_ctx": 3 * N_CTX, "n_seq": 3}
CHANGES: tuple[Json, ...] = (GROW, SHRINK, OTHER)

REPEATED = (
    "One, two, three, four, five.\n" * 3 + "One, two, three, six, seven.\n" * 2 + "One, two,",
    "The cat sat on the mat.\nThe cat sat on the bed.\nThe dog sat on the mat.\n"
    "The dog sat on the chair.\nThe cat sat on",
)
SAMPLED: Json = {"temperature": 1, "seed": 7, "n_probs": 1, "ignore_eos": True, "n_predict": 200}
"""Log probabilities are in the answer, so that every bit of the logits counts."""
GREEDY: Json = {"temperature": 0, "ignore_eos": True, "n_predict": 200}
REAL: Json = GREEDY | {"n_probs": 1, "n_predict": 48}
"""For the real model, which takes a hundred times as long as a tiny one."""


@dataclass(frozen=True)
class Kind:
    """A model ("" is the default one), the engine's options, and what is asked of it."""

    model: str
    options: tuple[str, ...] = ()
    body: Mapping[str, object] | None = None
    texts: tuple[str, ...] = TEXTS[:N_SEQ]
    changes: tuple[Json, ...] = CHANGES

    @property
    def asked(self) -> Json:
        """The request, less its prompts."""
        return dict(self.body or (SAMPLED if self.model else REAL))

    @property
    def course(self) -> identity.Course:
        """What is asked, and the changes meanwhile."""
        return identity.Course(self.texts, self.asked, self.changes)


def cache_type(name: str) -> tuple[str, ...]:
    return ("--cache-type-k", name, "--cache-type-v", name, "--flash-attn", "on")


def streams(*counts: int) -> tuple[Json, ...]:
    return tuple({"n_seq": n, "n_ctx": 1024 * n} for n in counts)


FOUR: Mapping[str, Any] = {"texts": TEXTS, "changes": streams(8, 4, 16)}
UNIFIED = ("--kv-unified", "--no-cache-idle-slots")
"""Else the first request that comes clears every slot that is idle."""
SPLIT = ("--parallel", "4")
CHECKPOINTS = ("--ubatch-size", "32", "--checkpoint-min-step", "16")
"""Small steps, so that a short prompt has several checkpoints."""
KINDS = {
    "f16": Kind(""),
    "q8_0": Kind("", cache_type("q8_0")),
    "q4_0": Kind("", cache_type("q4_0")),
    "no flash attention": Kind("", ("--flash-attn", "off")),
    "unified": Kind("", UNIFIED),
    "tiny": Kind("llama-dense"),
    "tiny, four streams": Kind("llama-dense", SPLIT, **FOUR),
    "mixture of experts": Kind("llama-moe"),
    "mixture of experts, qwen3": Kind("qwen3moe-moe"),
    "sliding window": Kind("gemma3-dense", CHECKPOINTS),
    "sliding window, four streams": Kind("gemma3-dense", (*SPLIT, *CHECKPOINTS), **FOUR),
    "sliding window, q8_0": Kind("gemma3-dense", (*CHECKPOINTS, *cache_type("q8_0"))),
    "sliding window, unified": Kind("gemma3-dense", (*UNIFIED, *CHECKPOINTS)),
    "sliding window, whole": Kind(
        "gemma3-dense", ("--swa-full", *CHECKPOINTS), SAMPLED | {"n_predict": 300}
    ),  # longer than the cells that a window needs, which are 256
    "sliding window, gone around": Kind(
        "gemma3-dense", CHECKPOINTS, SAMPLED | {"n_probs": 0}, tuple(8 * text for text in TEXTS[:2])
    ),
    "chunked window": Kind("llama4-moe", CHECKPOINTS),
    "recurrent": Kind("mamba2-dense", CHECKPOINTS),
    "recurrent, four streams": Kind("mamba2-dense", (*SPLIT, *CHECKPOINTS), **FOUR),
    "hybrid, delta net": Kind("qwen35-dense", CHECKPOINTS),
    "hybrid, delta net, four streams": Kind("qwen35-dense", (*SPLIT, *CHECKPOINTS), **FOUR),
    "hybrid, delta net, q8_0": Kind("qwen35-dense", (*CHECKPOINTS, *cache_type("q8_0"))),
    "hybrid, delta net, unified": Kind("qwen35-dense", (*UNIFIED, *CHECKPOINTS)),
    "hybrid, convolution and window": Kind("lfm2-dense", CHECKPOINTS),
    "hybrid, mamba": Kind("jamba-dense", CHECKPOINTS),
    "hybrid, linear attention": Kind("minimax-01-moe", CHECKPOINTS),
    "hybrid, latent attention": Kind("kimi-linear-moe", CHECKPOINTS),
    "hybrid with an index": Kind("glm5-next-moe", CHECKPOINTS),
    "index for latent attention": Kind("hy_v4-moe", CHECKPOINTS),
    "index and sliding window": Kind("dots3note-moe", CHECKPOINTS),
    "index in the middle layers": Kind("minimax-m3-moe", CHECKPOINTS),
    "compressed cache": Kind("deepseek4-moe", CHECKPOINTS),
    "backend sampling": Kind(
        "llama-dense", ("--backend-sampling",), SAMPLED | {"n_probs": 0, "backend_sampling": True}
    ),
    "one stream to sixteen": Kind(
        "llama-dense", ("--parallel", "1"), texts=TEXTS[:1], changes=streams(2, 4, 16, 4)
    ),
    "one stream to sixteen, hybrid": Kind(
        "qwen35-dense", ("--parallel", "1"), texts=TEXTS[:1], changes=streams(2, 4, 16, 4)
    ),
}


def drafted(model: str, spec: str, *options: str, temperature: float = 0) -> Kind:
    body = GREEDY | {"temperature": temperature, "seed": 7, "n_predict": 200 if model else 72}
    return Kind(model, ("--spec-type", spec, *options), body, TEXTS[:N_SEQ] if model else REPEATED)


def ngrams(spec: str) -> Kind:
    """Drafts out of what was written before: three tokens, after each three that recur."""
    sizes = (f"--spec-{spec}-size-n", "3", f"--spec-{spec}-size-m", "3")
    return drafted("", spec, *sizes, temperature=0.5)


LLAMA_DRAFTS = ("--spec-draft-n-max", "3", "--model-draft", f"{TINY}llama-draft")
QWEN35_DRAFTS = ("--spec-draft-n-max", "3", "--model-draft", f"{TINY}qwen35-draft")
MTP = ("--spec-draft-n-max", "3")
NGRAM_MOD = (
    *("--spec-ngram-mod-n-match", "3", "--spec-ngram-mod-n-min", "1"),
    *("--spec-ngram-mod-n-max", "3"),
)
# The temperatures are such that some drafts are accepted and some are not.
DRAFTS = {
    "draft model": drafted("llama-dense", "draft-simple", *LLAMA_DRAFTS, temperature=0.05),
    "draft model, hybrid": drafted("qwen35-dense", "draft-simple", *QWEN35_DRAFTS),
    "draft model, hybrid, checkpoints": drafted(
        "qwen35-dense", "draft-simple", *QWEN35_DRAFTS, *CHECKPOINTS
    ),
    "draft model, hybrid, unified": drafted(
        "qwen35-dense", "draft-simple", *QWEN35_DRAFTS, *UNIFIED
    ),
    "draft model, its cache q8_0": drafted(
        "qwen35-dense",
        "draft-simple",
        *QWEN35_DRAFTS,
        *cache_type("q8_0"),
        "--spec-draft-type-k",
        "q8_0",
        "--spec-draft-type-v",
        "q8_0",
    ),
    "draft model of another kind": drafted(
        "qwen35-dense", "draft-simple", *LLAMA_DRAFTS, temperature=0.3
    ),
    "MTP": drafted("qwen35-mtp", "draft-mtp", *MTP),
    "MTP, checkpoints": drafted("qwen35-mtp", "draft-mtp", *MTP, *CHECKPOINTS),
    "MTP, unified": drafted("qwen35-mtp", "draft-mtp", *MTP, *UNIFIED),
    "MTP, four streams": replace(
        drafted("qwen35-mtp", "draft-mtp", *MTP, *SPLIT, *CHECKPOINTS), **FOUR
    ),
    "ngram-simple": ngrams("ngram-simple"),
    "ngram-map-k": ngrams("ngram-map-k"),
    "ngram-map-k4v": ngrams("ngram-map-k4v"),
    "ngram-mod": drafted("", "ngram-mod", *NGRAM_MOD, temperature=0.5),
    "ngram-cache": drafted("", "ngram-cache"),
}
LORA = ("--lora", f"{TINY}llama-lora")
ADAPTERS = {
    "LoRA": Kind("llama-dense", LORA),
    "LoRA, scaled": Kind("llama-dense", LORA, SAMPLED | {"lora": [{"id": 0, "scale": 0.5}]}),
    "control vector": Kind("llama-dense", ("--control-vector", f"{TINY}llama-control-vector")),
}
LAYOUTS: tuple[Json, ...] = ({"kv_unified": True}, {"kv_unified": False})


@pytest.fixture
def launch(request: pytest.FixtureRequest, engine_path: Path, tiny: TinyModels) -> Launch:
    """Start an engine on a tiny model by its name, or on the default model."""

    def start(model: str, *options: str) -> AbstractContextManager[LiveEngine]:
        if not model:
            return live_engine(engine_path, request.getfixturevalue("model_path"), *options)
        options = tiny.options(options)
        # The tiny models say that they were trained on 256 tokens, which bounds every slot.
        wide = f"{model.rpartition('-')[0]}.context_length=int:{8 * N_CTX}"
        # A second thread would have less to compute than to wait for.
        one = ("--threads", "1", "--threads-batch", "1")
        return live_engine(engine_path, tiny.model(model), "--override-kv", wide, *one, *options)

    return start


def undisturbed(launch: Launch, kind: Kind) -> identity.Run:
    return identity.undisturbed(partial(launch, kind.model, *kind.options), kind.course)


def compared(launch: Launch, kind: Kind) -> identity.Run:
    """Compare a changed run with an undisturbed one, which is returned."""
    control = undisturbed(launch, kind)
    changed = identity.disturbed(partial(launch, kind.model, *kind.options), kind.course)
    identity.compare(control, changed)
    return control


@pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in KINDS.items()])
def test_generations_go_on_across_changes_and_are_kept(launch: Launch, kind: Kind) -> None:
    control = compared(launch, kind)
    assert all(later.n_reused > 0 for later in control.continued)


@pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in DRAFTS.items()])
def test_drafts_go_on_across_changes(launch: Launch, kind: Kind) -> None:
    control = compared(launch, kind)
    n_drafted, n_accepted = map(sum, zip(*control.generation.draft_counts, strict=True))
    assert 5 < n_accepted < n_drafted, "hardly any is accepted, or all are"


@pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in ADAPTERS.items()])
def test_adapters_stay_across_changes(launch: Launch, kind: Kind) -> None:
    control = compared(launch, kind)
    assert control.generation.tokens != undisturbed(launch, Kind(kind.model)).generation.tokens


def test_the_scale_of_an_adapter_stays(launch: Launch) -> None:
    body = {"prompt": TEXTS[0], "n_predict": 20, "temperature": 0, "cache_prompt": False}
    with launch("llama-dense", *LORA) as live:

        def answer() -> str:
            return str(live.ask("/completion", **body, id_slot=0).receipt["content"])

        full = answer()
        scale = [{"id": 0, "scale": 0.25}]
        live.tcp.post("/lora-adapters", json=scale).raise_for_status()
        quarter = answer()
        assert quarter != full
        for change in CHANGES:
            assert live.reconfigure(**change).receipt["outcome"] == "applied"
            assert live.tcp.get("/lora-adapters").json()[0]["scale"] == 0.25
            assert answer() == quarter


def scaled(live: LiveEngine, slot: int) -> tuple[int, list[int]]:
    """Generate long in this slot, with a scale of its own; return its length and the tokens."""
    lora = [{"id": 0, "scale": (0.3, 0.9)[slot]}]
    body = SAMPLED | {"prompt": TEXTS[slot], "n_predict": 600, "n_probs": 0, "lora": lora}
    answer = live.ask("/completion", **body, id_slot=slot, return_tokens=True).receipt
    tokens: list[int] = answer["tokens"]
    return answer["tokens_evaluated"] + len(tokens), tokens


def busy(live: LiveEngine) -> bool:
    return all(slot["is_processing"] for slot in live.slots())


def test_each_generation_keeps_its_own_scale(launch: Launch) -> None:
    with launch("llama-dense", *LORA) as live:
        control = [scaled(live, slot) for slot in (0, 1)]
    for _ in range(TRIES):
        with launch("llama-dense", *LORA) as live, ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(scaled, live, slot) for slot in (0, 1)]
            until(partial(busy, live))
            receipts = [live.reconfigure(**change).receipt for change in CHANGES]
            assert [answer.result(WITHIN_S) for answer in answers] == control
        moved = [slot for receipt in receipts for slot in receipt["slots"]]
        # Different scales do not share a batch: one slot waits while the other one generates.
        if all(slot["tokens"] < control[slot["slot"]][0] for slot in moved):
            return
    raise AssertionError(f"no change came in time: {receipts}")


@pytest.mark.parametrize("model", ["", "llama-dense", "gemma3-dense", "qwen35-dense"])
def test_generations_go_on_between_unified_and_separate_caches(launch: Launch, model: str) -> None:
    """The layouts round differently, so the words are compared and not the bits."""
    body = (GREEDY if model else REAL) | {"n_probs": 0}
    kind = Kind(model, body=body, changes=2 * LAYOUTS)
    compared(launch, kind)


def prompted(
    live: LiveEngine, body: Json, changes: Sequence[Json]
) -> tuple[list[Json], list[int], list[float]]:
    """Ask with these changes while the prompt is processed.

    Return the receipts, and what was written: tokens and their log probabilities.
    """
    left, receipts, tokens = list(changes), list[Json](), list[int]()
    probabilities: list[Json] = []
    for event in live.events("/completion", body | {"return_progress": True}):
        if progress := event.get("prompt_progress"):
            if left and 0 < progress["processed"] < progress["total"]:
                receipts.append(live.reconfigure(**left.pop(0)).receipt)
        elif not event["stop"]:
            tokens += event["tokens"]
            probabilities += event["completion_probabilities"]
    assert not left
    return receipts, tokens, [token["logprob"] for token in probabilities]


@pytest.mark.parametrize("model", ["llama-dense", "gemma3-dense", "mamba2-dense", "qwen35-dense"])
def test_half_a_prompt_goes_on_after_changes(launch: Launch, model: str) -> None:
    """Where a sliding window has gone around its cells, a move changes their order: it rounds."""
    options = ("--batch-size", "16", "--ubatch-size", "16")
    with launch(model, *options) as live:
        prompt = 15 * tokens_of(live, TEXTS[0])
        body = SAMPLED | {"prompt": prompt, "n_predict": 20, "id_slot": 0}
        _, tokens, logprobs = prompted(live, body, ())
    assert len(tokens) == len(logprobs) == 20
    for _ in range(TRIES):
        with launch(model, *options) as live:
            receipts, *changed = prompted(live, body, CHANGES)
        assert changed == [tokens, pytest.approx(logprobs, abs=1e-4)]
        if all(receipt["tokens_held"] < len(prompt) for receipt in receipts):
            return
    raise AssertionError(f"no change came in time: {receipts}")


def answered(answers: Sequence[list[Any]], enough: Sequence[int]) -> bool:
    return all(len(mine) >= n for mine, n in zip(answers, enough, strict=True))


def asked_while_changed(
    live: LiveEngine, ask: Callable[[], Sequence[float]], changes: Sequence[Json]
) -> list[Sequence[float]]:
    """Return the answers to a request that two callers make again and again during the changes."""
    ended = threading.Event()
    answers: tuple[list[Sequence[float]], ...] = ([], [])

    def ask_on(mine: list[Sequence[float]]) -> None:
        while not ended.is_set():
            mine.append(ask())

    with ThreadPoolExecutor(len(answers)) as pool:
        callers = [pool.submit(ask_on, mine) for mine in answers]
        try:
            for change in changes:
                enough = [len(mine) + 2 for mine in answers]
                assert live.reconfigure(**change).receipt["outcome"] == "applied"
                until(partial(answered, answers, enough))
        finally:
            ended.set()
        for caller in callers:
            caller.result(WITHIN_S)
    return [answer for mine in answers for answer in mine]


def embedding(live: LiveEngine, text: str) -> list[float]:
    answer = live.ask("/v1/embeddings", input=text).receipt
    values: list[float] = answer["data"][0]["embedding"]
    return values


def rank(live: LiveEngine, text: str) -> list[float]:
    answer = live.ask("/v1/rerank", query=TEXTS[0], documents=[text]).receipt
    return [answer["results"][0]["relevance_score"]]


EMBEDDINGS = ("--embeddings", "--pooling")
FIVE = (GROW, {"n_ctx": N_CTX}, *streams(8, 16), {"n_ctx": 2 * N_CTX})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        pytest.param(embedding, Kind("llama-dense", (*EMBEDDINGS, "mean")), id="mean"),
        pytest.param(embedding, Kind("llama-dense", (*EMBEDDINGS, "last")), id="last"),
        pytest.param(rank, Kind("qwen3-ranker", ("--reranking",)), id="rank"),
    ],
)
def test_embeddings_and_ranks_are_the_same_during_changes(
    launch: Launch, value: Callable[[LiveEngine, str], list[float]], kind: Kind
) -> None:
    with launch(kind.model, *kind.options) as live:
        before = pytest.approx(value(live, TEXTS[1]), rel=1e-3, abs=1e-5)
        assert value(live, TEXTS[2]) != before
        answers = asked_while_changed(live, lambda: value(live, TEXTS[1]), FIVE)
        assert all(answer == before for answer in answers)
        assert value(live, TEXTS[1]) == before
        assert live.props()["n_weight_loads"] == 1


def test_embeddings_survive_a_number_of_slots_that_libllama_cannot_pool(launch: Launch) -> None:
    """It aborts where the slots do not divide the batch: such a change is refused, or works."""
    with launch("llama-dense", *EMBEDDINGS, "mean") as live:
        before = embedding(live, TEXTS[0])
        answer = live.reconfigure(n_ctx=3 * N_CTX, n_seq=3)
        if answer.status != 200:
            assert (answer.status, answer.error["reason"]) == (400, "invalid_geometry")
        assert embedding(live, TEXTS[0]) == before
