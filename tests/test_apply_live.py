"""Apply with the real engine: what is live keeps its weights, what is not is known beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from live_engine import PATIENT_THREADS
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import ApplyRequest, ApplyResult, EngineRequest, UpRequest
from sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 120.0
STORY = "Once upon a time there was a lighthouse keeper who kept a fox. Every evening" * 8


class Live(Sandbox):
    """A sandbox with the real engine, which holds one conversation."""

    def __init__(self, engine: Path, model: Path) -> None:
        super().__init__()
        self.env |= PATIENT_THREADS
        self.start()
        spec = EngineRequest(model=str(model), n_ctx=8192, n_seq=2, port=self.port)
        operation = self.client.up(UpRequest(spec=spec, engine_path=str(engine)))
        self.client.wait_operation(operation, timeout_s=PATIENCE_S)
        self.ask()

    def ask(self, slot: int = 0, times: int = 1) -> int:
        """Go on with the conversation; return how many tokens of it were computed again."""
        body = {"prompt": STORY * times, "n_predict": 1, "temperature": 0, "cache_prompt": True}
        body["id_slot"] = slot
        url = f"http://127.0.0.1:{self.port}/completion"
        answer = httpx.post(url, json=body, timeout=PATIENCE_S).raise_for_status().json()
        return int(answer["timings"]["prompt_n"])

    def apply(self, engine: dict[str, Any], **how: object) -> ApplyResult:
        request = ApplyRequest.parse({"engine": engine} | how)
        ended = self.client.wait_operation(self.client.apply(request), timeout_s=PATIENCE_S)
        assert isinstance(ended.result, ApplyResult)
        return ended.result


@pytest.fixture(scope="module")
def live(engine_path: Path, model_path: Path) -> Iterator[Live]:
    box = Live(engine_path, model_path)
    yield box
    box.close()


def test_what_is_live_keeps_the_weights_and_the_conversation(live: Live) -> None:
    pid = live.engine_pid()
    assert live.ask() == 1, "the prefix is held"
    for engine in ({"n_ctx": 16384}, {"n_seq": 3}, {"n_ctx": 10000}, {"kv_unified": True}):
        result = live.apply(engine)
        assert result.plan.action == "reconfigure"
        assert result.plan.memory is not None
        assert result.plan.memory.needed_bytes > 2**20
        outcomes = {fate.what: fate.outcome for fate in result.plan.conversations}
        assert outcomes["slot 0"] == "stays"
        assert live.ask() == 1
        assert live.apply(engine).plan.action == "none", "requested is compared, not effective"
    assert live.engine_pid() == pid
    assert live.client.status().weight_loads == 1


def test_what_is_not_live_is_named_with_what_it_takes(live: Live) -> None:
    before = live.client.status().desired
    result = live.apply({"extra_args": ["-t", "1", "-ctk", "q8_0"]}, dry_run=True)
    assert [(each.field, each.kind, each.after) for each in result.plan.reasons] == [
        ("--cache-type-k", "context", "q8_0"),
        ("--threads", "context", "1"),
    ]
    memory = result.plan.memory
    assert memory is not None, result.plan.notes
    assert memory.available_bytes is not None
    assert 90 * 2**20 < memory.needed_bytes < memory.available_bytes
    fates = {fate.what: fate.fate for fate in result.plan.conversations}
    assert fates["slot 0"] == (
        "kept in files: the next engine is another: --cache-type-k is q8_0, not f16"
    )
    assert result.plan.expected_s is not None
    assert live.client.status().desired == before


@pytest.mark.parametrize(
    "engine", [{"n_ctx": 2**22}, {"n_ctx": 2**22, "extra_args": ["-t", "1"]}], ids=str
)
def test_what_does_not_fit_is_refused_with_both_numbers(live: Live, engine: dict[str, Any]) -> None:
    before = live.client.status()
    with pytest.raises(LlamactlError) as caught:
        live.apply(engine)
    assert caught.value.exit_code == 5
    needed, there = (caught.value.details[f"bytes_{what}"] for what in ("needed", "available"))
    assert needed > there > 0
    assert f"({-(-needed // 2**20)} MiB needed, {there // 2**20} MiB" in caught.value.message
    assert live.client.status() == before


def test_what_the_engine_cannot_even_measure_is_refused_in_its_words(live: Live) -> None:
    with pytest.raises(LlamactlError, match=r"a context of 1073741824 tokens takes") as caught:
        live.apply({"n_ctx": 2**30, "extra_args": ["-t", "1"]})
    assert caught.value.code == "apply_refused"


def test_a_file_that_is_no_model_is_refused(live: Live, tmp_path: Path) -> None:
    broken = tmp_path / "m.gguf"
    broken.write_bytes(b"GGUF and nothing more")
    pid = live.engine_pid()
    with pytest.raises(LlamactlError) as caught:
        live.apply({"model": str(broken)})
    assert caught.value.code == "apply_refused"
    assert live.engine_pid() == pid


def test_a_copy_of_the_model_is_no_change_and_another_one_is(
    live: Live, model_path: Path, tmp_path: Path
) -> None:
    pid = live.engine_pid()
    copied, weights = tmp_path / "copied.gguf", model_path.read_bytes()
    copied.write_bytes(weights)
    assert live.apply({"model": str(copied)}).plan.action == "none"
    copied.write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    result = live.apply({"model": str(copied)}, dry_run=True)
    assert [reason.field for reason in result.plan.reasons] == ["--model"]
    assert live.apply({"model": str(model_path)}).plan.action == "none"
    assert live.engine_pid() == pid


def test_what_a_plan_says_of_each_conversation_is_what_comes_of_it(live: Live) -> None:
    """In slots that are too small for one of them."""
    engine = {"n_ctx": 256 * 3, "n_seq": 3, "kv_unified": False, "extra_args": ["-t", "2"]}
    live.client.wait_operation(live.client.page_out("fox", 0), timeout_s=PATIENCE_S)
    live.ask(slot=1, times=4)
    planned = live.apply(engine, dry_run=True).plan.conversations
    told = {each.what: each.outcome for each in planned}
    lifecycle = live.apply(engine).lifecycle
    assert lifecycle is not None
    assert lifecycle.carried is not None
    came = {each.what: each.fate.value for each in lifecycle.carried.conversations}
    words = {"carried": "back", "left": "left"}
    assert {what: words[outcome] for what, outcome in told.items()} == came
    assert came == {"page fox": "back", "slot 1": "left"}


def test_a_relaunch_serves_with_what_was_asked_for(live: Live) -> None:
    pid, loads = live.engine_pid(), live.client.status().weight_loads
    result = live.apply({"extra_args": ["-t", "1"]})
    assert result.plan.action == "relaunch"
    assert live.engine_pid() != pid
    assert live.client.status().weight_loads == loads + 1
    assert live.ask() > 0
