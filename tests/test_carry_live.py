"""The real engine's conversations outlive it: the next request finds its prefix in the next one."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from live_daemon import PATIENCE_S, Live
from llamactl_supervisor import store
from llamactl_supervisor.carry import Manifest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import (
    ApplyRequest,
    ApplyResult,
    CarryReport,
    EngineConfig,
    EngineState,
    LifecycleResult,
    Operation,
)
from sandbox import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiny_models import TinyModels

DRAIN_S = 3.0
ON_A_SMALL_DISK = """#!/bin/sh
exec unshare --mount --propagation private sh -c '
    mount -t tmpfs -o size=2m none "$0" && exec "$@"
' "{directory}" "{engine}" "$@"
"""


@pytest.fixture
def live(engine_path: Path, model_path: Path) -> Iterator[Live]:
    with contextlib.closing(Live(engine_path, model_path, drain_s=DRAIN_S)) as box:
        box.start()
        yield box


@dataclass(frozen=True)
class Talk:
    """A conversation: what it began with, and how many tokens the engine holds of it."""

    prompt: list[int]
    n_tokens: int


def talk(live: Live, slot: int, n_prompt: int, seed: int) -> Talk:
    """Have a conversation that no other begins like."""
    prompt = [1000 + seed, *((seed * 7919 + 31 * i) % 4000 + 200 for i in range(n_prompt - 1))]
    done = ask(live, prompt, slot)
    assert done["tokens_cached"] >= n_prompt
    return Talk(prompt, n_prompt)


def ask(live: Live, prompt: list[int], slot: int) -> dict[str, Any]:
    return live.complete(prompt=prompt, id_slot=slot, n_predict=1, temperature=0)


def prefilled(live: Live, talk: Talk, slot: int) -> int:
    """Go on with it in this slot; return how many of its old tokens were computed once more."""
    timings = ask(live, [*talk.prompt, 77, 78, 79], slot)["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == talk.n_tokens + 3
    again: int = talk.n_tokens - timings["cache_n"]
    return again


def ended(live: Live, operation: Operation) -> CarryReport:
    result = live.client.wait_operation(operation, timeout_s=PATIENCE_S).result
    assert isinstance(result, LifecycleResult)
    assert result.carried is not None, result
    return result.carried


def stopped(live: Live) -> None:
    report = ended(live, live.client.stop())
    assert {each.fate for each in report.conversations} == {"written"}


def fates(report: CarryReport) -> dict[str, tuple[str, str | None]]:
    return {each.what: (each.fate, each.place) for each in report.conversations}


def manifest(live: Live) -> Manifest:
    return store.read(live.paths.carry_file, Manifest)[0]


def done(live: Live, operation: Operation) -> None:
    live.client.wait_operation(operation, timeout_s=PATIENCE_S)


def up_again(live: Live, *extra: str, n_ctx: int = 2048, n_seq: int = 2) -> CarryReport:
    """Bring another engine up; return what came back."""
    return ended(live, live.client.up(live.request_real(*extra, n_ctx=n_ctx, n_seq=n_seq)))


def test_a_request_that_comes_meanwhile_finds_its_conversation(live: Live) -> None:
    """Nobody gets in before the conversations do, however soon he asks."""
    live.up_real(n_ctx=2048)
    first = talk(live, 0, 300, 1)
    operation = live.client.restart()
    answered = live.pool.submit(lambda: until(partial(answer, live, first), within_s=PATIENCE_S))
    ended(live, operation)
    told = answered.result()
    assert told is not None
    assert told["timings"]["cache_n"] == first.n_tokens


def answer(live: Live, talk: Talk) -> dict[str, Any] | None:
    """Ask, once there is an engine that is another; None: nobody answers, or not yet."""
    if live.client.status().generation == 1:
        return None
    with contextlib.suppress(httpx.HTTPError):
        return ask(live, [*talk.prompt, 77], 0)
    return None


def test_what_generates_is_drained_or_cut_and_kept(live: Live) -> None:
    live.up_real(n_ctx=8192)
    endless: list[str] = []
    body = {"prompt": "Once upon a time", "n_predict": 3000, "ignore_eos": True, "temperature": 0}
    cut = live.pool.submit(live.stream, endless, **body, id_slot=0)
    until(lambda: len(endless) > 5, within_s=PATIENCE_S)
    report = ended(live, live.client.restart())
    assert cut.result(PATIENCE_S)["error"]["code"] == 503
    assert report.n_cut == 1
    assert report.took_s > DRAIN_S
    (kept,) = report.conversations
    assert (kept.fate, kept.place) == ("back", "slot 0")
    written = "".join(endless)
    again = live.complete(**body | {"prompt": f"Once upon a time{written}", "n_predict": 1})
    assert again["timings"]["cache_n"] >= kept.n_tokens - 2, "but for how its end is spelt"
    brief: list[str] = []
    going = live.pool.submit(live.stream, brief, **body | {"n_predict": 4}, id_slot=1)
    until(lambda: brief, within_s=PATIENCE_S)
    report = ended(live, live.client.restart())
    assert report.n_cut == 0
    assert going.result(PATIENCE_S)["stop"] is True


def test_stop_and_start_keep_and_a_smaller_window_leaves_what_is_too_long(live: Live) -> None:
    live.up_real(n_ctx=2048)
    long, short = talk(live, 0, 400, 1), talk(live, 1, 60, 2)
    stopped(live)
    ended(live, live.client.start())
    assert prefilled(live, short, 1) == 0
    stopped(live)
    report = up_again(live, n_ctx=512)
    assert fates(report)["slot 1"] == ("back", "slot 1")
    (left,) = report.of("left")
    assert (left.what, left.n_tokens) == ("slot 0", 400)
    assert left.reason
    stopped(live)
    report = up_again(live)
    assert {each.fate for each in report.conversations} == {"back"}
    assert prefilled(live, long, 0) == 0


def test_fewer_slots_make_a_page_of_the_other(live: Live) -> None:
    live.up_real(n_ctx=2048)
    first, second = talk(live, 0, 60, 1), talk(live, 1, 90, 2)
    stopped(live)
    report = up_again(live, n_ctx=1024, n_seq=1)
    assert fates(report) == {"slot 0": ("back", "slot 0"), "slot 1": ("back", "page carried-1")}
    assert prefilled(live, first, 0) == 0
    done(live, live.client.page_in("carried-1", 0))
    assert prefilled(live, second, 0) == 0


def test_what_is_parked_stays_parked_until_there_is_room(live: Live) -> None:
    """By a change or for want of slots, over relaunches; nobody has to ask for its page."""
    live.up_real(n_ctx=2048)
    first, second = talk(live, 0, 60, 1), talk(live, 1, 90, 2)
    done(live, live.client.reconfigure(n_ctx=1024, n_seq=1))
    report = ended(live, live.client.restart())
    assert fates(report)["page parked-0"] == ("back", "page carried-1")
    done(live, live.client.reconfigure(n_ctx=2048, n_seq=2))
    assert live.client.pages().pages == ()
    assert prefilled(live, second, 1) == 0
    stopped(live)
    assert fates(up_again(live, n_ctx=1024, n_seq=1))["slot 1"] == ("back", "page carried-1")
    stopped(live)
    assert fates(up_again(live, n_ctx=1024, n_seq=1))["page carried-1"][0] == "back"
    stopped(live)
    assert fates(up_again(live, n_ctx=8192, n_seq=4)) == {
        "slot 0": ("back", "slot 0"),
        "page carried-1": ("back", "slot 1"),
    }
    assert prefilled(live, first, 0) == 0
    assert prefilled(live, second, 1) == -2, "nor of what was asked since"


def test_another_kv_type_leaves_all_in_files_and_other_threads_none(live: Live) -> None:
    live.up_real(n_ctx=2048)
    first = talk(live, 0, 60, 1)
    stopped(live)
    report = up_again(live, "-ctk", "q8_0")
    (left,) = report.conversations
    assert left.fate == "left"
    assert "q8_0" in str(left.reason)
    assert (live.paths.pages / left.file).exists()
    done(live, live.client.stop())
    report = up_again(live, "--threads", "1")
    assert fates(report) == {"slot 0": ("back", "slot 0")}
    assert prefilled(live, first, 0) == 0


def applied(live: Live, **engine: Any) -> CarryReport:
    """Apply this; return what became of the conversations in the relaunch that it takes."""
    asked = ApplyRequest(engine=EngineConfig(**engine))
    result = live.client.wait_operation(live.client.apply(asked), timeout_s=PATIENCE_S).result
    assert isinstance(result, ApplyResult)
    assert result.lifecycle is not None
    assert result.lifecycle.carried is not None
    return result.lifecycle.carried


def test_two_models_in_turn_find_their_conversations_in_their_slots(
    live: Live, tiny: TinyModels
) -> None:
    models = [str(live.weights), str(tiny.model("qwen3-dense"))]
    live.up_real(n_ctx=2048)
    talks = {models[0]: [talk(live, 0, 60, 1), talk(live, 1, 90, 2)]}
    applied(live, model=models[1])
    talks[models[1]] = [garbage(live, 0, 150, 3), garbage(live, 1, 120, 4)]
    for model in [*models, *models]:
        report = applied(live, model=model)
        assert [len(report.of("back")), len(report.of("left"))] == [2, 2]
        assert {each.reason for each in report.of("left")} == {
            f"it is of another model, {next(other for other in models if other != model)}"
        }
        assert live.client.pages().pages == ()
        assert max(prefilled(live, each, slot) for slot, each in enumerate(talks[model])) <= 0


def garbage(live: Live, slot: int, n_prompt: int, seed: int) -> Talk:
    """Have a conversation with a model of a tiny vocabulary."""
    prompt = [seed, *((seed * 7919 + 31 * i) % 100 + 20 for i in range(n_prompt - 1))]
    assert ask(live, prompt, slot)["tokens_cached"] >= n_prompt
    return Talk(prompt, n_prompt)


def test_what_is_left_of_another_kv_type_takes_no_slot(live: Live) -> None:
    live.up_real(n_ctx=2048)
    first, second = talk(live, 0, 60, 1), talk(live, 1, 90, 2)
    applied(live, extra_args=("-ctk", "q8_0"))
    talk(live, 0, 200, 3)
    report = applied(live, extra_args=())
    assert fates(report)["slot 1"] == ("back", "slot 1")
    (left,) = report.of("left")
    assert left.reason == "its KV types are q8_0/f16, this engine's are f16/f16"
    for threads in ("1", "2"):
        report = applied(live, extra_args=("--threads", threads))
        assert sorted(each.fate for each in report.conversations) == ["back", "back", "left"]
        assert live.client.pages().pages == ()
        assert max(prefilled(live, first, 0), prefilled(live, second, 1)) <= 0


def test_an_apply_that_relaunches_keeps_them(live: Live) -> None:
    live.up_real(n_ctx=2048)
    first, second = talk(live, 0, 60, 1), talk(live, 1, 90, 2)
    wanted = live.request_real("--threads", "1", n_ctx=2048, n_seq=2)
    asked = ApplyRequest(engine=EngineConfig(extra_args=wanted.spec.extra_args))
    result = live.client.wait_operation(live.client.apply(asked), timeout_s=PATIENCE_S).result
    assert isinstance(result, ApplyResult)
    assert result.lifecycle is not None
    assert result.lifecycle.carried is not None
    assert {each.fate for each in result.lifecycle.carried.conversations} == {"back"}
    assert [prefilled(live, first, 0), prefilled(live, second, 1)] == [0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_disk_that_is_full_refuses_a_restart_and_the_engine_serves_on(live: Live) -> None:
    """The small conversation fits, the big one does not; the mount is the engine's own."""
    small_disk, binary = live.root / "small", live.root / "engine-on-a-small-disk"
    small_disk.mkdir()
    binary.write_text(ON_A_SMALL_DISK.format(directory=small_disk, engine=live.engine))
    binary.chmod(0o700)
    live.engine = binary
    pid = live.up_real("--slot-save-path", f"{small_disk}/", n_ctx=2048)
    big, small = talk(live, 0, 200, 1), talk(live, 1, 20, 2)
    with pytest.raises(LlamactlError) as caught:
        done(live, live.client.restart())
    assert caught.value.code == "carry_failed"
    assert "slot 0 (200 tokens)" in caught.value.message
    assert live.engine_pid() == pid
    assert [prefilled(live, big, 0), prefilled(live, small, 1)] == [0, 0]
    until(lambda: not manifest(live).conversations)
    report = ended(live, live.client.stop())
    assert {each.what: each.fate for each in report.conversations} == {
        "slot 0": "lost",
        "slot 1": "written",
    }


def is_written(live: Live) -> bool:
    return bool(manifest(live).conversations)


def is_loading(live: Live) -> bool:
    return live.client.status().generation == 2


def comes_back(live: Live) -> bool:
    """Or has come back already: the real engine takes a few milliseconds for it."""
    coming = any(each.into is not None for each in manifest(live).conversations)
    status = live.client.status()
    return coming or (status.generation, status.state) == (2, EngineState.READY)


@pytest.mark.parametrize("moment", [is_written, is_loading, comes_back])
def test_a_daemon_that_is_killed_in_a_restart_loses_nothing(live: Live, moment: Any) -> None:
    live.up_real(n_ctx=2048)
    first, second = talk(live, 0, 60, 1), talk(live, 1, 90, 2)
    live.client.restart()
    until(partial(moment, live))
    live.kill_daemon()
    live.start()
    until(lambda: live.client.status().state is EngineState.READY, within_s=PATIENCE_S)
    assert [prefilled(live, first, 0), prefilled(live, second, 1)] == [0, 0]
    until(lambda: not manifest(live).conversations)
    assert live.client.pages().pages == ()
