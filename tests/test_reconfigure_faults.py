"""A change that fails at any step ends in the old geometry with every state: real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from live_engine import N_CTX, N_SEQ, Faulty, LiveEngine, live_engine
from llamactl_validate.streams import Stream, streams
from sandbox import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiny_models import TinyModels

GROW = {"n_ctx": 4 * N_CTX, "n_seq": 2 * N_SEQ}
SHRINK = {"n_seq": 1}
PROMPTS = ("The lighthouse keeper walked down to the shore and", "Water begins to boil when")
BODY = {"n_predict": 96, "temperature": 0.7, "seed": 5, "ignore_eos": True, "cache_prompt": False}
LONG_WINDOW = ("--override-kv", "llama.context_length=int:8192")
RELEASE_FIRST = "build_no_memory 1"
"""The build beside fails for memory: the old contexts are let go first."""


@pytest.fixture(scope="module")
def shared(
    tools_dir: Path, tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Faulty]:
    faults = tmp_path_factory.mktemp("faults") / "faults"
    env = {"LLAMA_SERVER_TEST_FAULTS": str(faults)}
    draft = ("--spec-type", "draft-simple", "--model-draft", str(tiny.model("llama-draft")))
    options = (*LONG_WINDOW, *draft, "--spec-draft-n-max", "3", "--backend-sampling")
    engine, model = tools_dir / "llama-server-faults", tiny.model("llama-dense")
    with live_engine(engine, model, *options, env=env) as live:
        yield Faulty(live, faults)


@pytest.fixture
def faulty(shared: Faulty) -> Faulty:
    shared.inject()
    shared.live.reset()
    return shared


@pytest.fixture(scope="module")
def control(shared: Faulty) -> list[str]:
    """What an undisturbed run answers each prompt with."""
    shared.inject()
    shared.live.reset()
    return [stream.text for stream in generate(shared.live)]


def generate(live: LiveEngine, change: Any = None) -> list[Stream]:
    """Run both generations, with a change in the middle of both."""
    with streams(live) as running:
        both = [running.start(**BODY, prompt=prompt, id_slot=n) for n, prompt in enumerate(PROMPTS)]
        if change:
            for stream in both:
                stream.reach(6)
            change()
        for stream in both:
            stream.result()
    return both


BESIDE = ["build 1", "sync 1", "move 1", "move 2", "attach 1", "attach 2"]
RELEASED = ["build 1", "build_draft 1", "restore 1", "restore 2", "attach 1", "attach 2"]


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        *((GROW, (step,)) for step in BESIDE),
        (GROW, ("build_draft 1", "build_draft 2")),
        (SHRINK, ("capture 1",)),
        (SHRINK, ("move 1",)),
        *((GROW, (RELEASE_FIRST, step)) for step in ("capture 1", "capture 2", *RELEASED)),
        *((SHRINK, (RELEASE_FIRST, step)) for step in ("capture 2", "build 1", "restore 1")),
    ],
    ids=str,
)
def test_a_change_that_fails_leaves_every_generation_where_it_was(
    faulty: Faulty, control: list[str], change: dict[str, int], faults: tuple[str, ...]
) -> None:
    before = faulty.live.geometry()

    def fail() -> None:
        faulty.inject(*faults)
        answer = faulty.live.reconfigure(**change)
        assert answer.status in (500, 503), answer.body
        assert answer.error["reason"] in ("context_build_failed", "page_out_failed")
        assert faulty.live.geometry() == before
        assert faulty.live.props()["parked"] == []
        assert all(slot["is_processing"] for slot in faulty.live.slots())

    assert [stream.text for stream in generate(faulty.live, fail)] == control
    assert faulty.live.props()["n_weight_loads"] == 1


@pytest.mark.parametrize("change", [GROW, SHRINK], ids=["grow", "shrink"])
def test_the_old_contexts_are_let_go_first_where_both_do_not_fit(
    faulty: Faulty, control: list[str], change: dict[str, int]
) -> None:
    def succeed() -> None:
        faulty.inject(RELEASE_FIRST)
        receipt = faulty.live.reconfigure(**change).receipt
        assert (receipt["outcome"], receipt["beside"]) == ("applied", False)
        phases = receipt["phases_ms"]
        assert {"release", "build"} < phases.keys()
        assert sum(phases.values()) == pytest.approx(receipt["pause_ms"], abs=1e-6)
        assert len(receipt["slots"]) == 2
        faulty.inject()
        faulty.live.reconfigure(**GROW)

    assert [stream.text for stream in generate(faulty.live, succeed)] == control


def test_a_parked_state_that_cannot_be_placed_stays_parked(
    faulty: Faulty, control: list[str]
) -> None:
    def park_and_fail_to_place() -> None:
        assert len(faulty.live.reconfigure(**SHRINK).receipt["parked"]) == 1
        faulty.inject("place 1")
        receipt = faulty.live.reconfigure(**GROW).receipt
        assert [parked["slot"] for parked in receipt["parked"]] == [1]
        faulty.inject()
        assert faulty.live.reconfigure(n_ctx=N_CTX, n_seq=N_SEQ).receipt["parked"] == []

    assert [stream.text for stream in generate(faulty.live, park_and_fail_to_place)] == control


@pytest.mark.parametrize("faults", [("build 1", "build 2"), ("restore 1", "restore 2")], ids=str)
def test_where_nothing_can_be_built_every_state_is_kept_by_name(
    faulty: Faulty, control: list[str], faults: tuple[str, ...]
) -> None:
    live = faulty.live

    def strand_and_come_back() -> None:
        faulty.inject(RELEASE_FIRST, *faults)
        answer = live.reconfigure(**GROW)
        assert (answer.status, answer.error["reason"]) == (503, "context_build_failed")
        assert "every state is parked" in answer.error["message"]
        parked = answer.error["details"]["parked"]
        assert [(each["slot"], each["reason"], each["running"]) for each in parked] == [
            (0, "no_context", True),
            (1, "no_context", True),
        ]
        props = live.props()
        assert not props["is_serving"]
        assert len(props["parked"]) == len(live.tcp.get("/pages").json()) == 2
        assert live.tcp.get("/health").status_code == 200
        assert live.ask("/slots/0?action=erase").status == 400
        # one that fails again loses nothing either
        faulty.inject("build 1")
        assert live.reconfigure(n_ctx=N_CTX, n_seq=1).status == 503
        faulty.inject()
        receipt = live.reconfigure(n_ctx=N_CTX, n_seq=N_SEQ).receipt
        assert [slot["fate"] for slot in receipt["slots"]] == ["placed", "placed"]
        assert live.props()["is_serving"]

    assert [stream.text for stream in generate(live, strand_and_come_back)] == control
    assert live.props()["n_weight_loads"] == 1


def test_a_request_that_comes_while_nothing_serves_waits_for_the_next_geometry(
    faulty: Faulty,
) -> None:
    live = faulty.live
    faulty.inject(RELEASE_FIRST, "build 1", "build 2")
    assert live.reconfigure(**GROW).status == 503
    with streams(live) as running:
        waiting = running.start(**BODY, prompt=PROMPTS[0], id_slot=1)
        faulty.inject()
        assert not live.props()["is_serving"]
        live.reconfigure(n_ctx=N_CTX, n_seq=N_SEQ)
        assert waiting.result()["tokens_predicted"] == BODY["n_predict"]


def test_slow_steps_hold_up_nobody_else(tools_dir: Path, model_path: Path) -> None:
    env = {"LLAMA_SERVER_TEST_STEP_DELAY_MS": "400"}
    with (
        live_engine(tools_dir / "llama-server-faults", model_path, env=env) as live,
        streams(live) as running,
    ):
        body = BODY | {"n_predict": 48}
        stream = running.start(**body, prompt=PROMPTS[0], id_slot=0)
        stream.reach(6)
        change = running.submit(lambda: live.reconfigure(**GROW))
        late = running.submit(lambda: live.ask("/completion", **body, prompt=PROMPTS[1]))
        n_healthy = 0
        while not change.done():
            assert live.tcp.get("/health").status_code == 200
            n_healthy += 1
        assert n_healthy > 5
        receipt = change.result().receipt
        assert receipt["pause_ms"] > 800
        assert receipt["outside_pause_ms"]["build"] > 400
        assert late.result().status == 200
        assert stream.result()["tokens_predicted"] == body["n_predict"]


def test_a_slot_that_was_to_be_parked_and_can_stay_after_all_keeps_its_drafts(
    tools_dir: Path, tiny: TinyModels
) -> None:
    """Room comes free while the new contexts are built, and memory was set aside for parking."""
    env = {"LLAMA_SERVER_TEST_STEP_DELAY_MS": "300"}
    draft = ("--spec-type", "draft-simple", "--model-draft", str(tiny.model("llama-draft")))
    engine, model = tools_dir / "llama-server-faults", tiny.model("llama-dense")
    unified = ("--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0")
    with (
        live_engine(engine, model, *LONG_WINDOW, *draft, *unified, env=env) as live,
        streams(live) as running,
    ):
        for slot in (1, 0):
            prompt = [slot + 20, *range(30, 90), *range(30, 90), *range(30, 60)]
            live.ask("/completion", **BODY | {"n_predict": 8}, prompt=prompt, id_slot=slot)
        planned = live.reconfigure(n_ctx=256, dry_run=True).receipt
        assert [parked["slot"] for parked in planned["parked"]] == [1]
        change = running.submit(lambda: live.reconfigure(n_ctx=256))
        until(lambda: live.log().count("building the new contexts") == 2)
        live.erase(0)
        receipt = change.result().receipt
        assert receipt["outcome"] == "applied"
        assert [slot["fate"] for slot in receipt["slots"]] == ["resident"]
        assert receipt["parked"] == []
