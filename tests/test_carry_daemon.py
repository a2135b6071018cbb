"""Real daemons carry conversations from one fake engine into the next, whoever dies meanwhile."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from llamactl_supervisor import store
from llamactl_supervisor.carry import Manifest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import (
    ApplyRequest,
    CarriedConversation,
    CarriedLine,
    CarryReport,
    EngineConfig,
    EngineState,
    LifecycleResult,
    Operation,
    Pages,
)
from sandbox import WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKENS = {"0": 50, "1": 7}
PAGES = {"fox": 30}


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=2, crashes_max=2, drain_s=0.3, carry_s=20)
    yield sandbox
    sandbox.close()


def up(box: Sandbox, *fake: str) -> int:
    """Run an engine that holds two slots and a page."""
    box.start()
    pid = box.up(*fake)
    box.say(tokens=TOKENS, stored=PAGES)
    return pid


def ended(box: Sandbox, operation: Operation) -> CarryReport:
    result = box.client.wait_operation(operation, timeout_s=WITHIN_S).result
    assert isinstance(result, LifecycleResult)
    assert result.carried is not None
    return result.carried


def told(conversations: tuple[CarriedConversation, ...]) -> list[tuple[str, str, str | None]]:
    return [(each.what, each.fate, each.place) for each in conversations]


def holds(box: Sandbox) -> dict[str, Any]:
    """Return what the engine holds; it must not be quiet."""
    until(lambda: not box.say()["is_quiet"])
    said = box.say()
    return {name: said[name] for name in ("tokens", "stored")}


def manifest(box: Sandbox) -> Manifest:
    return store.read(box.paths.carry_file, Manifest)[0]


def files(box: Sandbox) -> list[Path]:
    """Return what is in the pages directory, without sidecars."""
    return sorted(path for path in box.paths.pages.iterdir() if not path.suffix)


def until_clean(box: Sandbox) -> None:
    until(lambda: not list(box.paths.pages.iterdir()) and not manifest(box).conversations)


def says(box: Sandbox, text: str) -> bool:
    return (box.client.status().carrying or "").startswith(text)


def test_a_model_by_another_name_is_the_same(box: Sandbox) -> None:
    """What an engine holds is of the file that it loaded, by whatever path that was asked for."""
    pid = up(box)
    link = box.root / "link.gguf"
    link.symlink_to(box.model)
    ask_for_model(box, link)
    assert box.engine_pid() == pid
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    ask_for_model(box, box.model)
    report = ended(box, box.client.start())
    assert told(report.conversations) == [
        ("page fox", "back", "page fox"),
        ("slot 0", "back", "slot 0"),
        ("slot 1", "back", "slot 1"),
    ]


def ask_for_model(box: Sandbox, model: Path) -> None:
    asked = box.client.apply(ApplyRequest.parse({"engine": {"model": str(model)}}))
    box.client.wait_operation(asked, timeout_s=WITHIN_S)


def test_a_restart_keeps_everything_and_tells_of_it(box: Sandbox) -> None:
    first = up(box)
    report = ended(box, box.client.restart())
    assert box.engine_pid() != first
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}
    assert told(report.conversations) == [
        ("page fox", "back", "page fox"),
        ("slot 0", "back", "slot 0"),
        ("slot 1", "back", "slot 1"),
    ]
    assert report.n_bytes == sum(tokens * 1024 + 512 for tokens in (50, 7, 30))
    assert report.took_s >= report.quiet_s > 0
    until_clean(box)
    out, back = (line for line in box.client.ledger().lines if isinstance(line, CarriedLine))
    assert (out.way, back.way) == ("out", "in")
    assert out.by == back.by != "daemon"
    assert [each.what for each in out.conversations] == ["slot 0", "page fox", "slot 1"]
    assert {each.fate for each in out.conversations} == {"written"}
    assert back.conversations == report.conversations
    text = box.metrics()
    assert "llamactl_conversations_carried_total 3.0" in text
    assert "llamactl_conversations_lost_total 0.0" in text
    assert box.paths.carry_file.stat().st_mode & 0o777 == 0o600


def test_a_restart_that_would_lose_one_is_refused_and_nothing_is_touched(box: Sandbox) -> None:
    pid = up(box)
    box.say(full=True)
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert (caught.value.code, caught.value.exit_code) == ("carry_failed", 5)
    assert "slot 0 (50 tokens): there is no space for it" in caught.value.message
    assert "slot 1 (7 tokens): not tried, for another was not written" in caught.value.message
    assert (box.engine_pid(), box.client.status().state) == (pid, EngineState.READY)
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}
    until_clean(box)
    report = ended(box, box.client.restart(accept_loss=True))
    assert {each.fate for each in report.conversations} == {"lost"}
    assert {each.reason for each in report.conversations} == {"there is no space for it"}
    assert "llamactl_conversations_lost_total 3.0" in box.metrics()
    assert holds(box)["stored"] == {}
    assert "conversation lost: page fox (30 tokens" in box.daemon_log()
    until_clean(box)


def test_a_stop_keeps_all_for_the_next_start(box: Sandbox) -> None:
    up(box)
    report = ended(box, box.client.stop())
    assert {each.fate for each in report.conversations} == {"written"}
    assert len(files(box)) == len(manifest(box).conversations) == 3
    report = ended(box, box.client.start())
    assert {each.fate for each in report.conversations} == {"back"}
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}
    until_clean(box)


def test_what_a_stop_cannot_keep_is_named(box: Sandbox) -> None:
    up(box)
    box.say(full=True)
    report = ended(box, box.client.stop())
    assert {each.fate for each in report.conversations} == {"lost"}
    (line,) = (line for line in box.client.ledger().lines if isinstance(line, CarriedLine))
    assert line.conversations == report.conversations
    assert manifest(box).conversations == ()


def test_a_term_keeps_all_and_a_stop_without_carrying_nothing(box: Sandbox) -> None:
    up(box)
    box.daemons[-1].send_signal(signal.SIGTERM)
    assert box.daemons[-1].wait(WITHIN_S) == 0
    assert len(manifest(box).conversations) == 3
    box.env["LLAMACTL_CARRY_ON_STOP"] = "false"
    box.start()
    box.client.wait_operation(box.client.start(), timeout_s=WITHIN_S)
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}
    until_clean(box)
    done = box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S).result
    assert isinstance(done, LifecycleResult)
    assert done.carried is None
    assert manifest(box).conversations == ()


def other_model(box: Sandbox) -> Path:
    """Return a model that is another one."""
    path = box.root / "other.gguf"
    path.write_bytes(b"GGUF, and others")
    return path


def test_another_model_leaves_them_for_the_one_that_they_are_of(box: Sandbox) -> None:
    up(box)
    ended(box, box.client.stop())
    first, box.model = box.model, other_model(box)
    report = ended(box, box.client.up(box.request()))
    assert {each.fate for each in report.conversations} == {"left"}
    assert {each.reason for each in report.conversations} == {f"it is of another model, {first}"}
    assert holds(box) == {"tokens": {}, "stored": {}}
    assert len(files(box)) == len(manifest(box).conversations) == 3
    box.say(tokens={"1": 12})
    ended(box, box.client.stop())
    assert len(manifest(box).conversations) == 4
    box.model = first
    report = ended(box, box.client.up(box.request()))
    fates = {each.what: each.fate for each in report.conversations if each.n_tokens != 12}
    assert fates == {"slot 0": "back", "page fox": "back", "slot 1": "back"}
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}
    (left,) = manifest(box).conversations
    assert (left.n_tokens, left.model) == (12, str(box.root / "other.gguf"))
    assert [path.name for path in files(box)] == [left.file]


def test_two_models_in_turn_each_find_their_slots_as_they_were(box: Sandbox) -> None:
    """The other's are longer; no page is made of anything, and no file left of what is back."""
    box.start()
    models = {str(box.model): {"0": 5, "1": 7}, str(other_model(box)): {"0": 90, "1": 80}}
    seen = set[str]()
    for model in [*models] * 3:
        box.model = Path(model)
        operation = box.client.up(box.request())
        box.client.wait_operation(operation, timeout_s=WITHIN_S)
        if model in seen:
            assert holds(box) == {"tokens": models[model], "stored": {}}
        seen.add(model)
        box.say(tokens=models[model], stored={})
        ended(box, box.client.stop())
        assert len(files(box)) == len(manifest(box).conversations) == 2 * len(seen)


def spoil(box: Sandbox, slot: int) -> None:
    """Have the engine refuse what was in this slot, though all that is known of it fits."""
    (found,) = (each for each in manifest(box).conversations if each.slot == slot)
    file = box.paths.pages / found.file
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": "/another.gguf"}))


def test_the_place_of_what_is_refused_is_the_next_one_s(box: Sandbox) -> None:
    """What became a page for want of a slot, else what was left for want of one."""
    box.start()
    request = box.request()
    wide = request.model_copy(update={"spec": request.spec.model_copy(update={"n_seq": 3})})
    narrow = request.model_copy(update={"spec": request.spec.model_copy(update={"n_seq": 1})})
    box.client.wait_operation(box.client.up(wide), timeout_s=WITHIN_S)
    box.say(tokens={"0": 50, "1": 7, "2": 9}, stored={})
    ended(box, box.client.stop())
    spoil(box, 0)
    report = ended(box, box.client.up(narrow))
    assert told(report.conversations) == [
        ("slot 2", "back", "slot 0"),
        ("slot 1", "back", "page carried-2"),
        ("slot 0", "left", next(e.file for e in report.conversations if e.fate == "left")),
    ]
    assert holds(box) == {"tokens": {"0": 9}, "stored": {"carried-2": 7}}
    box.say(tokens={"0": 3}, stored={})
    ended(box, box.client.stop())
    (kept,) = (each for each in manifest(box).conversations if each.n_tokens == 50)
    state = {"n_tokens": 50, "model": str(box.model)}
    (box.paths.pages / kept.file).write_text(json.dumps(state))
    (other,) = (each for each in manifest(box).conversations if each.n_tokens == 3)
    (box.paths.pages / other.file).write_text(json.dumps(state | {"model": "/another.gguf"}))
    report = ended(box, box.client.up(narrow))
    assert holds(box) == {"tokens": {"0": 50}, "stored": {}}
    assert {each.n_tokens: each.fate for each in report.conversations} == {3: "left", 50: "back"}


def test_what_is_left_is_shown_and_can_be_dropped(box: Sandbox) -> None:
    up(box)
    ended(box, box.client.stop())
    assert (box.client.status().in_files, box.client.status().in_files_bytes) == (3, 90624)
    first, box.model = box.model, other_model(box)
    ended(box, box.client.up(box.request()))
    left = box.client.pages().left
    assert {(each.what, each.reason) for each in left} == {
        (what, f"it is of another model, {first}") for what in ("slot 0", "slot 1", "page fox")
    }
    dropped = next(each for each in left if each.what == "slot 0")
    box.client.wait_operation(box.client.page_drop(dropped.file), timeout_s=WITHIN_S)
    assert len(files(box)) == len(box.client.pages().left) == box.client.status().in_files == 2
    assert not [path for path in box.paths.pages.iterdir() if path.name.startswith(dropped.file)]
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.page_drop(dropped.file), timeout_s=WITHIN_S)
    assert caught.value.code == "unknown_page"
    shown = box.client.pages().left
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    assert box.client.pages() == Pages(pages=(), left=shown), "also where there is no engine"


def test_what_is_left_is_bounded_and_what_has_to_go_is_named(box: Sandbox) -> None:
    box.env["LLAMACTL_CARRY_LEFT_BYTES_MAX"] = str(45 * 1024)
    up(box)
    ended(box, box.client.stop())
    box.model = other_model(box)
    report = ended(box, box.client.up(box.request()))
    assert {each.what: each.fate for each in report.conversations} == {
        "slot 0": "dropped",
        "page fox": "left",
        "slot 1": "left",
    }
    (gone,) = report.of("dropped")
    assert gone.reason == "46080 bytes are kept of what is left (daemon.carry_left_bytes_max)"
    assert f"conversation dropped: slot 0 (50 tokens, {gone.file})" in box.daemon_log()
    assert [each.n_tokens for each in manifest(box).conversations] == [30, 7]
    assert sorted(each.file for each in manifest(box).conversations) == [p.name for p in files(box)]


def test_fewer_slots_make_pages_of_what_has_none(box: Sandbox) -> None:
    up(box)
    ended(box, box.client.stop())
    report = ended(box, box.client.up(box.request(n_seq=1)))
    assert told(report.conversations) == [
        ("page fox", "back", "page fox"),
        ("slot 1", "back", "page carried-1"),
        ("slot 0", "back", "slot 0"),
    ]
    assert holds(box) == {"tokens": {"0": 50}, "stored": {"fox": 30, "carried-1": 7}}


def test_an_engine_of_before_is_not_restarted_with_what_it_holds(box: Sandbox) -> None:
    first = up(box, "--fake-restless")
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert (caught.value.code, caught.value.exit_code) == ("carry_failed", 5)
    for what in ("slot 0 (50 tokens)", "page fox (30 tokens)", "slot 1 (7 tokens)"):
        assert f"{what}: the next engine cannot take it" in caught.value.message
    assert box.engine_pid() == first
    report = ended(box, box.client.restart(accept_loss=True))
    assert {(each.fate, each.reason) for each in report.conversations} == {
        ("lost", "it cannot be kept: the engine is of a build that does not know /quiesce")
    }
    assert len(report.conversations) == 3
    second = box.engine_pid()
    assert second != first
    box.say(tokens={}, stored={})
    box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert box.engine_pid() != second, "it holds nothing"


@pytest.mark.parametrize("older", ["before", "after"])
def test_an_apply_that_one_of_the_two_engines_cannot_follow_is_refused(
    box: Sandbox, older: str
) -> None:
    """Upgrade and downgrade: each conversation is named, and the engine serves on."""
    flags = (("--fake-restless",), ())
    before, after = flags if older == "before" else reversed(flags)
    first = up(box, *before)
    asked = ApplyRequest(engine=EngineConfig(extra_args=after))
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.apply(asked), timeout_s=WITHIN_S)
    assert (caught.value.code, caught.value.exit_code) == ("carry_failed", 5)
    for what in ("slot 0 (50 tokens)", "page fox (30 tokens)", "slot 1 (7 tokens)"):
        assert what in caught.value.message
    assert box.engine_pid() == first
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}


def test_a_question_for_quiet_that_is_never_answered_is_given_up(box: Sandbox) -> None:
    """By a restart and by a stop, which does not wait until the engine was told to go on."""
    box.env["LLAMACTL_PROBE_S"] = "1"  # to answer that is no work
    pid = up(box)
    box.say(quiesce_s=600.0)
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert caught.value.code == "carry_failed"
    assert "did not become quiet" in caught.value.message
    assert box.engine_pid() == pid
    box.say(quiesce_s=0.0)
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}, "it is told again until it knows"
    box.say(quiesce_s=600.0)
    report = ended(box, box.client.stop())
    assert report.problem is not None
    assert "did not become quiet" in report.problem.message


def test_a_batch_that_outlasts_the_time_of_requests_costs_nothing(box: Sandbox) -> None:
    """The engine answers between two batches: after longer than requests have to end."""
    box.env["LLAMACTL_DRAIN_S"] = "0.5"
    up(box)
    box.say(quiesce_s=2.0)
    report = ended(box, box.client.stop())
    assert report.problem is None
    fates = {each.what: each.fate for each in report.conversations}
    assert fates == dict.fromkeys(("slot 0", "page fox", "slot 1"), "written")


def test_an_engine_that_does_not_say_what_it_holds_is_soon_given_up(box: Sandbox) -> None:
    """A restart leaves it alone, a stop ends it: no budget for files is spent on the question."""
    box.env |= {"LLAMACTL_CARRY_S": "600", "LLAMACTL_DRAIN_S": "20"}
    box.env["LLAMACTL_PROBE_S"] = "1"  # to answer that is no work
    pid = up(box, "--fake-mute")
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert caught.value.code == "carry_failed"
    assert "does not say what its slots hold" in caught.value.message
    assert box.engine_pid() == pid
    news: list[str] = []
    stop = box.client.stop()
    box.client.wait_operation(stop, timeout_s=WITHIN_S, on_progress=news.append)
    assert any(text.startswith("asking what its slots hold, for 10 s") for text in news)
    assert "asking what its slots hold, for 10 s" in box.daemon_log()


@pytest.mark.parametrize("how", ["stop", "down", "interrupt"])
def test_a_stop_is_cut_short_by_another_that_does_not_wait(box: Sandbox, how: str) -> None:
    box.env |= {"LLAMACTL_CARRY_S": "600", "LLAMACTL_DRAIN_S": "20"}
    box.env["LLAMACTL_CLOSE_S"] = "20"  # so long it waits for whoever asks how it ended
    up(box, "--fake-file-s", "600")
    begun = box.client.stop() if how == "stop" else box.client.down()
    until(partial(says, box, "writing 1 of 3 conversations, until "))
    if how == "interrupt":
        box.daemons[-1].send_signal(signal.SIGINT)
    else:
        again = {"stop": box.client.stop, "down": box.client.down}[how]
        again(now=True)
    report = ended(box, begun)
    assert report.problem is not None
    assert report.problem.message.startswith("stopped at once, without the end of: writing 1 of 3")
    assert {each.fate for each in report.conversations} == {"lost"}
    assert len(report.conversations) == 3


@pytest.mark.parametrize("how", ["stop", "stop again", "interrupts"])
def test_who_does_not_wait_for_requests_loses_no_conversation(box: Sandbox, how: str) -> None:
    box.env |= {"LLAMACTL_DRAIN_S": "600", "LLAMACTL_CLOSE_S": "20"}
    up(box)
    box.say(n_processing=2)
    if how == "stop":
        begun = box.client.stop(now=True)
    else:
        begun = box.client.stop() if how == "stop again" else box.client.down()
        until(partial(says, box, "waiting for 2 requests to end, until "))
        if how == "interrupts":
            box.daemons[-1].send_signal(signal.SIGINT)
        else:
            box.client.stop(now=True)
    report = ended(box, begun)
    assert (report.n_cut, report.problem) == (2, None)
    assert told(report.conversations)
    assert {each.fate for each in report.conversations} == {"written"}


def test_what_is_lost_before_it_was_quiet_is_named(box: Sandbox) -> None:
    box.env |= {"LLAMACTL_DRAIN_S": "600"}
    up(box, "--fake-file-s", "600")
    box.say(n_processing=2)
    begun = box.client.stop()
    until(partial(says, box, "waiting for 2 requests to end, until "))
    box.say(quiesce_s=600)
    box.client.stop(now=True)
    box.client.stop(now=True)
    report = ended(box, begun)
    lost = [("page fox", "lost", None), ("slot 0", "lost", None), ("slot 1", "lost", None)]
    assert sorted(told(report.conversations)) == lost
    assert "conversation lost: slot 0 (50 tokens" in box.daemon_log()


def test_a_sleeping_engine_is_not_woken_for_slots_that_are_empty(box: Sandbox) -> None:
    """It would die of the question."""
    up(box, "--fake-asleep")
    report = ended(box, box.client.stop())
    assert [(each.what, each.fate) for each in report.conversations] == [("page fox", "written")]


def test_what_goes_on_for_too_long_is_cut_and_kept(box: Sandbox) -> None:
    up(box)
    box.say(n_processing=2)
    operation = box.client.restart()
    report = ended(box, operation)
    assert report.n_cut == 2
    assert {each.fate for each in report.conversations} == {"back"}
    assert holds(box)["tokens"] == TOKENS


def test_it_is_said_how_far_it_is(box: Sandbox) -> None:
    up(box, "--fake-waits-at", "2")
    operation = box.client.restart()
    for text in ("writing 2 of 3 conversations", "bringing back 2 of 3 conversations"):
        until(partial(says, box, text))
        assert box.client.operation(operation.id).progress.startswith(text)
        box.say(waits_at=0)
    ended(box, operation)
    assert box.client.status().carrying is None


def test_an_engine_that_is_killed_while_it_is_written_keeps_what_was(box: Sandbox) -> None:
    up(box)
    box.say(dies_at=2)
    report = ended(box, box.client.restart())
    assert told(report.conversations) == [
        ("page fox", "lost", None),
        ("slot 0", "back", "slot 0"),
        ("slot 1", "lost", None),
    ]
    assert holds(box) == {"tokens": {"0": 50}, "stored": {}}
    until_clean(box)


def test_a_daemon_that_is_killed_while_it_writes_leaves_the_engine_as_it_was(
    box: Sandbox,
) -> None:
    pid = up(box, "--fake-file-s", "0.5")
    box.client.restart()
    until(lambda: files(box))
    box.kill_daemon()
    assert box.say()["is_quiet"]
    assert len(manifest(box).conversations) == 3, "before the first file was written"
    box.start()
    box.until_state(EngineState.READY)
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}
    assert box.engine_pid() == pid
    until_clean(box)


def test_an_engine_that_holds_them_is_not_emptied_for_their_files(box: Sandbox) -> None:
    """Nothing is remembered of its service: state and ledger are gone, the manifest is not."""
    pid = up(box, "--fake-file-s", "0.5")
    box.client.restart()
    until(lambda: files(box))
    box.kill_daemon()
    box.paths.state_file.unlink()
    box.paths.ledger_file.unlink()
    box.start()
    box.until_state(EngineState.READY)
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}
    assert box.engine_pid() == pid
    until_clean(box)


def test_a_stop_whose_daemon_is_killed_is_brought_to_its_end(box: Sandbox) -> None:
    pid = up(box, "--fake-file-s", "0.5")
    box.client.stop()
    until(lambda: files(box))
    box.kill_daemon()
    box.start()
    until(lambda: not psutil.pid_exists(pid))
    box.until_state(EngineState.STOPPED)
    assert len(files(box)) == 3
    ended(box, box.client.start())
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}
    until_clean(box)


def test_a_daemon_that_is_killed_after_the_term_goes_on_with_the_restart(box: Sandbox) -> None:
    pid = up(box, "--fake-ignore-term")
    box.client.restart()
    until(lambda: store.peek(box.paths.state_file).stopping)
    box.kill_daemon()
    box.start()
    until(lambda: not psutil.pid_exists(pid))
    box.until_state(EngineState.READY)
    assert box.engine_pid() != pid
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}
    until_clean(box)


@pytest.mark.parametrize("moment", ["loading", "bringing back"])
def test_a_daemon_that_is_killed_in_the_next_load_loses_and_doubles_none(
    box: Sandbox, moment: str
) -> None:
    pid = up(box, "--fake-load-s", "1", "--fake-file-s", "0.3")
    box.client.restart()
    if moment == "loading":
        until(lambda: box.client.status().generation == 2)
    else:
        until(lambda: sum(each.into is not None for each in manifest(box).conversations) == 2)
    box.kill_daemon()
    assert len(files(box)) == 3, "they stay until an engine serves that has them"
    box.start()
    box.until_state(EngineState.READY)
    assert box.engine_pid() != pid
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}
    until_clean(box)


def test_an_engine_that_dies_with_what_came_back_leaves_the_files(box: Sandbox) -> None:
    up(box, "--fake-file-s", "0.5")
    operation = box.client.restart()
    until(lambda: any(each.into is not None for each in manifest(box).conversations))
    os.kill(box.engine_pid(), signal.SIGKILL)
    report = ended(box, operation)
    assert {each.fate for each in report.conversations} == {"back"}
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}
    until_clean(box)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda _: b"\0garbage",
        lambda text: text.replace(b"carry-", b"../../carry-"),
        lambda text: text.replace(b'"version": 1', b'"version": 7'),
    ],
    ids=["torn", "garbage", "hostile", "foreign"],
)
def test_a_manifest_that_makes_no_sense_is_set_aside(
    box: Sandbox, spoil: Callable[[bytes], bytes]
) -> None:
    up(box)
    ended(box, box.client.stop())
    text = spoil(box.paths.carry_file.read_bytes())
    box.paths.carry_file.write_bytes(text)
    kept = [(path, path.read_bytes()) for path in files(box)]
    box.client.wait_operation(box.client.start(), timeout_s=WITHIN_S)
    (aside,) = box.paths.state.glob("carry.json.broken-*")
    assert aside.read_bytes() == text
    assert f"set aside as {aside}" in box.daemon_log()
    assert [(path, path.read_bytes()) for path in files(box)] == kept


def test_a_manifest_that_cannot_be_had_refuses_a_restart(box: Sandbox) -> None:
    pid = up(box)
    box.paths.carry_file.mkdir()
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert caught.value.code == "carry_failed"
    assert "carry.json cannot be read" in caught.value.message
    assert box.engine_pid() == pid
    assert holds(box) == {"tokens": TOKENS, "stored": PAGES}


def test_files_that_are_gone_are_named(box: Sandbox) -> None:
    up(box)
    ended(box, box.client.stop())
    gone = next(each for each in manifest(box).conversations if each.page == "fox")
    (box.paths.pages / gone.file).unlink()
    report = ended(box, box.client.start())
    (lost,) = report.of("lost")
    assert (lost.what, lost.reason) == ("page fox", "its files are gone")
    assert json.loads(box.paths.carry_file.read_text())["conversations"] == []
