"""Apply from end to end: a daemon, a scripted engine, and what a person is told beforehand."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import (
    ApplyRequest,
    ApplyResult,
    EngineState,
    LoadLine,
    LostLine,
    Operation,
    OperationState,
)
from sandbox import WITHIN_S, Sandbox, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator

TOO_MUCH = 2**60


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=5, crashes_max=0)
    sandbox.start()
    yield sandbox
    sandbox.close()


def ask(box: Sandbox, engine: dict[str, object], **how: object) -> Operation:
    return box.client.apply(ApplyRequest.parse({"engine": engine} | how))


def applied(box: Sandbox, engine: dict[str, object], **how: object) -> ApplyResult:
    ended = box.client.wait_operation(ask(box, engine, **how), timeout_s=WITHIN_S)
    assert isinstance(ended.result, ApplyResult)
    return ended.result


def refused(box: Sandbox, engine: dict[str, object], **how: object) -> LlamactlError:
    with pytest.raises(LlamactlError) as caught:
        applied(box, engine, **how)
    return caught.value


def test_pages_that_come_back_count_and_the_prompt_cache_is_named(box: Sandbox) -> None:
    box.up()
    box.say(tokens={}, stored={"fox": 30, "hen": 50})
    threads: dict[str, object] = {"extra_args": ["--threads", "2"]}
    plan = applied(box, threads, dry_run=True).plan
    assert plan.memory is not None
    box.say(stored={})
    without = applied(box, threads, dry_run=True).plan
    assert without.memory is not None
    assert plan.memory.needed_bytes - without.memory.needed_bytes == 80 * 1024
    assert any("prompt cache" in note for note in plan.notes)


def test_a_live_change_that_does_not_fit_is_refused_in_the_words_of_a_relaunch(
    box: Sandbox,
) -> None:
    box.up("--fake-refuse", "insufficient_memory")
    error = refused(box, {"n_ctx": 32768})
    assert error.code == "insufficient_memory"
    assert "MiB available: " in error.message
    assert error.hint == "a smaller n_ctx or another model"
    assert error.details["limit"]


def test_a_geometry_changes_live_and_a_second_time_nothing_does(box: Sandbox) -> None:
    pid = box.up()
    result = applied(box, {"n_ctx": 32768, "n_seq": 3})
    assert result.applied
    assert [change.field for change in result.plan.changes] == ["n_ctx", "n_seq"]
    assert result.plan.memory is not None
    assert result.plan.memory.needed_bytes == 33024 * 1024, "as the engine rounds it"
    assert result.plan.memory.available_bytes is not None
    assert [fate.what for fate in result.plan.conversations] == ["slot 0"]
    assert result.plan.expected_s is None, "there was none before"
    again = applied(box, {"n_ctx": 32768, "n_seq": 3})
    assert (again.applied, again.plan.action) == (False, "none")
    third = applied(box, {"n_seq": 2})
    assert third.plan.expected_s == 0.0795
    assert box.engine_pid() == pid
    metrics = box.metrics()
    assert 'llamactl_reconfigures_total{outcome="applied"} 2.0' in metrics
    assert 'llamactl_operations_total{kind="apply",outcome="succeeded"} 3.0' in metrics


def test_a_cold_field_relaunches_and_is_named_with_its_class(box: Sandbox) -> None:
    pid = box.up()
    result = applied(box, {"extra_args": ["--threads", "3"]})
    assert [reason.model_dump() for reason in result.plan.reasons] == [
        {"field": "--threads", "kind": "context", "before": None, "after": "3"}
    ]
    assert result.lifecycle is not None
    assert result.lifecycle.pid == box.engine_pid() != pid
    assert result.plan.memory is not None
    assert result.plan.memory.needed_bytes == 1000 + 16384
    assert {fate.what: fate.n_tokens for fate in result.plan.conversations} == {
        "slot 0": 40,
        "slot 1": 41,
    }
    assert result.plan.expected_s is not None
    loads = [line for line in box.client.ledger().lines if isinstance(line, LoadLine)]
    assert [line.cause for line in loads] == ["up", "apply"]
    assert result.lifecycle.port_closed_s is not None
    assert result.lifecycle.port_closed_s > 0
    assert [line.port_closed_s for line in loads] == [None, result.lifecycle.port_closed_s]


def test_a_dry_run_touches_nothing(box: Sandbox) -> None:
    pid = box.up()
    before = box.client.status()
    cases: list[tuple[dict[str, object], str]] = [
        ({"n_seq": 3}, "reconfigure"),
        ({"extra_args": ["--threads", "3"]}, "relaunch"),
        ({}, "none"),
    ]
    for engine, action in cases:
        result = applied(box, engine, dry_run=True)
        assert (result.applied, result.plan.action) == (False, action)
    assert box.client.status() == before
    assert box.engine_pid() == pid


def test_what_does_not_fit_is_not_kept_for_the_next_start_either(box: Sandbox) -> None:
    box.up()
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    before = box.client.status().desired
    exc = refused(box, {"extra_args": ["--fake-needs", str(TOO_MUCH)]})
    assert exc.code == "insufficient_memory"
    assert exc.details["bytes_needed"] > exc.details["bytes_available"] > 0
    assert box.client.status().desired == before
    kept = applied(box, {"n_ctx": 32768}, dry_run=True).plan
    assert (kept.action, kept.expected_s, kept.notes) == ("store", None, ())
    assert kept.memory is not None
    assert kept.memory.needed_bytes == 1000 + 32768
    all_the_same: dict[str, object] = {"extra_args": ["--fake-needs", str(TOO_MUCH)]}
    assert applied(box, all_the_same, overcommit=True).applied


def test_the_geometry_does_not_depend_on_the_way_to_it(box: Sandbox) -> None:
    """What was asked for goes along: 16384 tokens are more in three slots, and not in two."""
    box.up()
    three = applied(box, {"n_ctx": 16384, "n_seq": 3}).receipt
    two = applied(box, {"n_seq": 2}).receipt
    assert three is not None
    assert two is not None
    assert (three.geometry.n_ctx, two.geometry.n_ctx) == (16896, 16384)
    box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    engine = box.client.status().engine
    assert engine is not None
    assert engine.geometry == two.geometry
    applied(box, {"n_seq": 3, "extra_args": ["--threads", "3"]})
    until(lambda: [line.n_ctx for line in loads_of(box)] == [16384, 16384, 16896])


def test_a_dry_run_wakes_nobody(box: Sandbox) -> None:
    box.up("--fake-asleep")
    box.say(stored={"fox": 99})
    live = applied(box, {"n_seq": 3}, dry_run=True).plan
    assert (live.action, live.notes) == (
        "reconfigure",
        ("the engine sleeps: the change wakes it, and loads its weights",),
    )
    assert [(each.what, each.outcome) for each in live.conversations] == [("page fox", "stays")]
    assert live.memory is not None
    cold = applied(box, {"extra_args": ["--threads", "3"]}, dry_run=True).plan
    assert [(each.what, each.outcome) for each in cold.conversations] == [("page fox", "carried")]
    said = box.say()
    assert (said["is_sleeping"], said["n_weight_loads"]) == (True, 1)
    done = ask(box, {"n_seq": 3})
    box.client.wait_operation(done, timeout_s=WITHIN_S)
    woken = until(lambda: [line for line in loads_of(box) if line.cause == "wake"])
    assert [line.by for line in woken] == [done.requested_by]


def test_of_an_engine_that_cannot_be_asked_everything_is_lost(box: Sandbox) -> None:
    box.up("--fake-restless")
    fates = applied(box, {"extra_args": ["--threads", "3"]}, dry_run=True).plan.conversations
    assert {(each.what, each.outcome) for each in fates} == {("slot 0", "lost"), ("slot 1", "lost")}


@pytest.mark.parametrize(
    ("engine", "code", "words"),
    [
        ({"extra_args": ["--no-such"]}, "apply_refused", "--no-such"),
        ({"model": "/no/model.gguf"}, "apply_refused", "cannot be read"),
        ({"engine_path": "/no/engine"}, "apply_refused", "/no/engine cannot be read"),
        ({"extra_args": ["--fake-needs", str(TOO_MUCH)]}, "insufficient_memory", "would not fit"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_touched(
    box: Sandbox, engine: dict[str, object], code: str, words: str
) -> None:
    pid = box.up()
    before = box.client.status()
    problem = refused(box, engine)
    assert (problem.code, problem.exit_code) == (code, 5)
    assert words in problem.message
    if code == "insufficient_memory":
        assert problem.details["bytes_needed"] == TOO_MUCH + 16384
        assert 0 < problem.details["bytes_available"] < TOO_MUCH
        assert f"{TOO_MUCH // 2**20 + 1} MiB needed" in problem.message
        assert f"{problem.details['bytes_available'] // 2**20} MiB available" in problem.message
    assert box.client.status() == before
    assert box.engine_pid() == pid


def test_overcommit_goes_ahead(box: Sandbox) -> None:
    box.up()
    engine: dict[str, object] = {"extra_args": ["--fake-needs", str(TOO_MUCH)]}
    assert applied(box, engine, overcommit=True).lifecycle is not None


def test_live_only_refuses_what_is_not(box: Sandbox) -> None:
    pid, port = box.up(), free_port()
    problem = refused(box, {"n_seq": 3, "port": port}, live_only=True)
    assert problem.code == "apply_refused"
    assert f"--port is {box.port}, to be {port}" in problem.message
    assert box.engine_pid() == pid
    assert applied(box, {"n_seq": 3}, live_only=True).receipt is not None


def test_an_engine_that_does_not_say_what_it_needs_is_relaunched_unchecked(box: Sandbox) -> None:
    box.up()
    result = applied(box, {"extra_args": ["--fake-older"]})
    assert result.plan.memory is None
    assert "does not say what it needs" in result.plan.notes[0]


def test_a_burst_comes_to_the_last_valid_one(box: Sandbox) -> None:
    box.up("--fake-reconfigure-s", "2")
    first = ask(box, {"n_seq": 3})
    until(lambda: box.client.status().state is EngineState.RECONFIGURING)
    assert refused(box, {"n_seq": 7}, dry_run=True).code == "operation_in_progress"
    later = [ask(box, {"n_seq": n_seq}) for n_seq in (4, 5, 6)]
    with pytest.raises(LlamactlError, match="--no-such"):
        ask(box, {"extra_args": ["--no-such"]})
    box.client.wait_operation(later[-1], timeout_s=WITHIN_S)
    ended = [box.client.operation(each.id) for each in (first, *later)]
    codes = [None if each.error is None else each.error.code for each in ended]
    assert codes == [None, "superseded", "superseded", None]
    status = box.client.status()
    assert status.desired is not None
    assert status.desired.spec.n_seq == 6
    assert len([line for line in box.client.ledger().lines if line.kind == "avoided"]) == 2


def test_of_a_burst_each_is_told_whether_it_is_in_force(box: Sandbox) -> None:
    box.up("--fake-reconfigure-s", "2")
    ask(box, {"n_seq": 3})
    until(lambda: box.client.status().state is EngineState.RECONFIGURING)
    threads: dict[str, object] = {"extra_args": ["--threads", "1"]}
    burst = [ask(box, {"n_ctx": 32768}), ask(box, threads), ask(box, {"n_ctx": 24576})]
    box.client.wait_operation(burst[-1], timeout_s=WITHIN_S)
    over, taken, newest = (box.client.operation(each.id) for each in burst)
    assert over.error is not None
    assert over.error.code == "superseded"
    assert isinstance(taken.result, ApplyResult)
    assert isinstance(newest.result, ApplyResult)
    assert taken.result == newest.result.model_copy(update={"with_operation": newest.id})
    assert (taken.plan, newest.result.plan.action) == (newest.result.plan, "relaunch")
    assert len(loads_of(box)) == 2, "one relaunch for both"
    status = box.client.status()
    assert status.desired is not None
    spec = status.desired.spec
    assert (spec.n_ctx, spec.n_seq, spec.extra_args) == (24576, 3, ("--threads", "1"))


def test_an_engine_that_does_not_load_gives_way_to_the_one_before(box: Sandbox) -> None:
    box.up()
    problem = refused(box, {"extra_args": ["--fake-load-exit", "3"]})
    assert (problem.code, problem.details["reason"]) == ("apply_failed", "engine_exited")
    assert "the engine that ran before is loaded again" in problem.message
    box.until_state(EngineState.READY)
    status = box.client.status()
    assert status.desired is not None
    assert status.desired.spec.extra_args == ()
    loads = until(lambda: loads_of(box) if len(loads_of(box)) == 3 else [])
    assert [(line.cause, line.loaded) for line in loads] == [
        *(("up", True), ("apply", False), ("restart", True))
    ]
    assert len({line.by for line in loads}) == 1, "all of them for the one who asked"


def loads_of(box: Sandbox) -> list[LoadLine]:
    return [line for line in box.client.ledger().lines if isinstance(line, LoadLine)]


def test_the_next_daemon_knows_what_the_engine_was_asked_to_be(box: Sandbox) -> None:
    box.up("--threads", "3")
    box.kill_daemon()
    box.start()
    box.until_state(EngineState.READY)
    result = applied(box, {"extra_args": ["--threads", "4"]}, dry_run=True)
    (reason,) = result.plan.reasons
    assert (reason.field, reason.before, reason.after) == ("--threads", "3", "4")


@pytest.mark.parametrize("state_is_lost", [False, True])
def test_state_of_an_older_daemon_is_read_and_what_is_missing_is_found_out(
    box: Sandbox, state_is_lost: bool
) -> None:
    box.up("--threads", "3")
    box.kill_daemon()
    (asked,) = box.paths.runtime.glob("engine-*/asked.json")
    for path, name in ((box.paths.state_file, "running_spec"), (asked, "spec")):
        saved = json.loads(path.read_text())
        assert saved.pop(name)["options"]["--threads"] == [["3"]]
        path.write_text(json.dumps(saved))
    if state_is_lost:
        box.paths.state_file.unlink()
    box.start()
    box.until_state(EngineState.READY)
    assert applied(box, {}, dry_run=True).plan.action == "none"


def test_an_apply_that_waits_ends_with_a_stop(box: Sandbox) -> None:
    box.up()
    box.say(slow_s=600)
    ask(box, {"n_seq": 3})
    until(lambda: box.client.status().state is EngineState.RECONFIGURING)
    waits = ask(box, {"n_seq": 4})
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    ended = box.client.operation(waits.id)
    assert ended.state is OperationState.FAILED
    assert ended.error is not None
    assert ended.error.code == "superseded"


def test_one_that_is_refused_takes_no_other_with_it(box: Sandbox) -> None:
    """In every order: what it asked for is asked for by none that came after it either."""
    pid = box.up()
    too_much: dict[str, object] = {"extra_args": ["--fake-needs", str(TOO_MUCH)]}
    box.say(slow_s=600)
    ask(box, {"n_seq": 3})
    until(lambda: box.client.status().state is EngineState.RECONFIGURING)
    first, second = ask(box, {"n_ctx": 32768}), ask(box, too_much)
    box.say(slow_s=0)
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(second, timeout_s=WITHIN_S)
    assert caught.value.code == "insufficient_memory"
    box.client.wait_operation(first, timeout_s=WITHIN_S)
    box.say(slow_s=600)
    ask(box, {"n_seq": 4})
    until(lambda: box.client.status().state is EngineState.RECONFIGURING)
    refused_one, last = ask(box, too_much), ask(box, {"n_ctx": 16384})
    box.say(slow_s=0)
    box.client.wait_operation(last, timeout_s=WITHIN_S)
    ended = box.client.operation(refused_one.id)
    assert ended.error is not None
    assert ended.error.code == "insufficient_memory"
    status = box.client.status()
    assert status.desired is not None
    spec = status.desired.spec
    assert (spec.n_ctx, spec.n_seq) == (16384, 4)
    assert spec.extra_args == ()
    assert box.engine_pid() == pid


def cut_off(box: Sandbox) -> list[LostLine]:
    return [line for line in box.client.ledger().lines if isinstance(line, LostLine)]


def test_an_apply_that_the_daemon_dies_over_is_told_by_the_next(box: Sandbox) -> None:
    box.up()
    box.say(slow_s=600)
    sent = ask(box, {"n_seq": 3})
    until(lambda: box.client.status().state is EngineState.RECONFIGURING)
    waits = ask(box, {"extra_args": ["--threads", "3"]})
    box.kill_daemon()
    box.start()
    box.until_state(EngineState.READY)
    lost = {each.operation: each for each in box.client.status().lost}
    assert lost[sent.id].outcome == "open"
    assert lost[waits.id].outcome == "lost"
    assert "--threads" in [field.field for field in lost[waits.id].differs]
    told = until(lambda: cut_off(box) if len(cut_off(box)) == 2 else [])
    assert {line.operation for line in told} == {sent.id, waits.id}
    assert {line.by for line in told} == {sent.requested_by}
    assert "did not finish: lost, nothing of it is in force" in box.daemon_log()
    box.say(slow_s=0)
    until(lambda: box.client.status().override)
    assert applied(box, {"n_ctx": 32768}).applied
    assert box.client.status().lost == ()


def test_a_relaunch_that_the_daemon_dies_over_goes_on_and_is_told(box: Sandbox) -> None:
    box.up()
    slow = ask(box, {"extra_args": ["--fake-load-s", "2"]})
    until(lambda: box.client.status().generation == 2 and box.client.status().engine is not None)
    box.kill_daemon()
    box.start()
    box.until_state(EngineState.READY)
    (lost,) = box.client.status().lost
    assert (lost.operation, lost.outcome, lost.differs) == (slow.id, "in_force", ())


def test_a_relaunch_that_a_stop_overtakes_is_told_when_the_engine_is_gone(box: Sandbox) -> None:
    box.up()
    slow = ask(box, {"extra_args": ["--fake-load-s", "60"]})
    until(lambda: box.client.status().generation == 2 and box.client.status().engine is not None)
    stop = box.client.stop()
    with pytest.raises(LlamactlError, match="no engine runs; the next start") as caught:
        box.client.wait_operation(slow, timeout_s=WITHIN_S)
    assert caught.value.code == "superseded"
    status = box.client.status()
    assert (status.state, status.engine) == (EngineState.STOPPED, None)
    assert status.desired is not None
    assert status.desired.spec.extra_args == ()
    box.client.wait_operation(stop, timeout_s=WITHIN_S)


def test_a_full_disk_ends_no_engine_for_one_that_it_would_not_let_start(box: Sandbox) -> None:
    pid = box.up()
    daemon = box.daemons[-1].pid
    before = psutil.Process(daemon).rlimit(psutil.RLIMIT_FSIZE)
    psutil.Process(daemon).rlimit(psutil.RLIMIT_FSIZE, (10, before[1]))
    problem = refused(box, {"extra_args": ["--threads", "3"]})
    assert (problem.code, problem.details["reason"]) == ("apply_refused", "state_unwritable")
    psutil.Process(daemon).rlimit(psutil.RLIMIT_FSIZE, before)
    status = box.client.status()
    assert (status.state, status.generation) == (EngineState.READY, 1)
    assert status.engine is not None
    assert status.engine.pid == pid
    assert status.desired is not None
    assert status.desired.spec.extra_args == ()


def test_an_address_that_cannot_be_had_is_found_out_before_anything_is_touched(
    box: Sandbox,
) -> None:
    pid = box.up()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = refused(box, {"port": stranger.getsockname()[1]}, dry_run=True)
        assert (taken.code, taken.details["reason"]) == ("apply_refused", "port_in_use")
        assert taken.details["pid"] == os.getpid()
    nowhere = refused(box, {"host": "10.99.99.99"})
    assert (nowhere.code, nowhere.exit_code) == ("apply_refused", 5)
    everywhere = applied(box, {"host": "0.0.0.0"}, dry_run=True)
    assert everywhere.plan.action == "relaunch", "its port is its own"
    status = box.client.status()
    assert (status.generation, status.engine and status.engine.pid) == (1, pid)


def test_a_live_apply_sets_nothing_that_nobody_asked_for(box: Sandbox) -> None:
    box.up()
    assert applied(box, {"n_ctx": 32768}).applied
    status = box.client.status()
    assert status.override is not None
    assert (status.override.n_ctx, status.override.kv_unified) == (32768, None)
    assert applied(box, {"n_seq": 3}).applied
    desired = box.client.status().desired
    assert desired is not None
    assert desired.spec.kv_unified is None
