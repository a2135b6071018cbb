"""A page verb that fails at any allocation or copy leaves slot, page and files as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from live_engine import Answer, Faulty, LiveEngine, live_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiny_models import TinyModels

CONVERSATIONS = {"one": [*range(20, 90)], "two": [*range(30, 100)]}
ASK = {"temperature": 0, "n_predict": 12, "ignore_eos": True, "n_probs": 1}
OPTIONS = (
    *("--override-kv", "qwen35.context_length=int:65536", "--cache-ram", "0", "--metrics"),
    *("--ubatch-size", "32", "--checkpoint-min-step", "16", "--spec-type", "draft-mtp"),
)

VERBS: dict[str, Callable[[LiveEngine], Answer]] = {
    "page_out": lambda live: live.page(1, "page_out", "new"),
    "page_out in place of a page": lambda live: live.page(1, "page_out", "kept"),
    "page_in": lambda live: live.page(1, "page_in", "kept"),
    "page_in to an empty slot": lambda live: live.page(0, "page_in", "kept"),
    "save": lambda live: live.file(1, "save", "file"),
    "restore": lambda live: live.file(1, "restore", "file"),
}
STEPS = {
    "page_out": [
        "page_measure 1",
        "page_measure 2",
        "page_allocate 1",
        "page_capture 1",
        "page_put 1",
    ],
    "page_out in place of a page": ["page_allocate 1", "page_capture 1", "page_put 1"],
    "page_in": ["page_measure 1", "page_allocate 1", "page_before 1", "page_restore 1"],
    "page_in to an empty slot": ["page_measure 1", "page_allocate 1", "page_restore 1"],
    "save": [
        "page_measure 1",
        "page_measure 2",
        "page_allocate 1",
        "page_clone 1",
        "page_capture 1",
    ],
    "restore": [
        *("load_allocate 1", "load_allocate 2", "load_allocate 3"),
        *("page_measure 1", "page_allocate 1", "page_before 1", "page_restore 1"),
    ],
}
CASES = [(verb, step) for verb, steps in STEPS.items() for step in steps]


@pytest.fixture(scope="module")
def shared(
    tools_dir: Path, tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Faulty]:
    faults = tmp_path_factory.mktemp("faults") / "faults"
    env = {"LLAMA_SERVER_TEST_FAULTS": str(faults)}
    engine, model = tools_dir / "llama-server-faults", tiny.model("qwen35-mtp")
    with live_engine(engine, model, *OPTIONS, env=env) as live:
        yield Faulty(live, faults)


@pytest.fixture
def faulty(shared: Faulty) -> Faulty:
    """Conversation `one` is page `kept` and file `file`, `two` is in slot 1, slot 0 is empty."""
    live = shared.live
    shared.inject()
    for page in live.pages():
        live.page(0, "page_drop", page["name"])
    live.erase()
    talk(live, 0, "one")
    assert live.file(0, "save", "file").status == 200
    assert live.page(0, "page_out", "kept").status == 200
    talk(live, 1, "two")
    return shared


def talk(live: LiveEngine, slot: int, who: str, *more: int) -> Any:
    body = ASK | {"prompt": [*CONVERSATIONS[who], *more], "id_slot": slot}
    answer = live.ask("/completion", **body).receipt
    written = [(each["id"], each["logprob"]) for each in answer["completion_probabilities"]]
    return answer["timings"]["cache_n"], written


def held(live: LiveEngine) -> Any:
    pages = [(page["name"], page["n_tokens"], page["n_bytes"]) for page in live.pages()]
    files = {path.name: path.read_bytes() for path in live.slot_files.iterdir()}
    return pages, [slot["n_prompt_tokens"] for slot in live.slots()], files


@pytest.mark.parametrize(("verb", "step"), CASES)
def test_a_failed_verb_leaves_everything_as_it_was(faulty: Faulty, verb: str, step: str) -> None:
    live = faulty.live
    before = held(live)
    n_failed = live.metric("page_failed_total")
    faulty.inject(step)
    answer = VERBS[verb](live)
    assert answer.status in (500, 503) or answer.error["reason"] == "bad_file", answer.body
    assert held(live) == before
    assert live.metric("page_failed_total") == n_failed + (answer.status >= 500)
    assert live.metric("page_store_bytes") == sum(page["n_bytes"] for page in live.pages())
    faulty.inject()
    # what the slot holds goes on as if nothing had been asked, and so does the page
    control = talk(live, 1, "two", 7, 8)
    live.erase()
    talk(live, 1, "two")
    assert talk(live, 1, "two", 7, 8) == control
    assert VERBS[verb](live).status == 200
    if "kept" in [page["name"] for page in live.pages()] and verb != "page_out in place of a page":
        n_reusable = live.page(0, "page_in", "kept").receipt["n_reusable"]
        assert n_reusable >= talk(live, 0, "one", 7, 8)[0] > 0


def test_a_slot_that_cannot_be_given_back_is_emptied_and_the_page_stays(faulty: Faulty) -> None:
    live = faulty.live
    faulty.inject("page_restore 1", "page_back 1")
    answer = live.page(1, "page_in", "kept")
    assert (answer.status, answer.error["reason"]) == (500, "page_failed")
    assert "slot 1 had to be emptied" in answer.error["message"]
    assert live.slots()[1]["n_prompt_tokens"] == 0
    faulty.inject()
    control = talk(live, 0, "two")
    assert talk(live, 1, "two")[1] == control[1]
    live.erase()
    n_reusable = live.page(1, "page_in", "kept").receipt["n_reusable"]
    assert n_reusable >= talk(live, 1, "one", 7, 8)[0] > 0
