"""Applies one after another: the newest valid one counts, and nothing is lost on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import applies, durable
from llamactl_supervisor import events as ev
from llamactl_supervisor.apply import comes_to
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import (
    ApplyRequest,
    ApplyResult,
    EngineState,
    ExitRecord,
    Intent,
)
from llamactl_supervisor.snapshot import Unended
from machine import (
    AT,
    CHANGE,
    COLD,
    COLD_A,
    CONFIG,
    CONTEXT,
    EMPTY,
    FACTS,
    NOW,
    ONE_LOST,
    OTHER,
    PATCH,
    PROBLEM,
    READY,
    RECORD,
    REQUEST,
    SETTINGS,
    SPEC,
    STATES,
    WIDE,
    WIDE_A,
    WRITTEN_OUT,
    planned,
    play,
    process,
    receipt,
)

if TYPE_CHECKING:
    from llamactl_supervisor.snapshot import Snapshot, Step

APPLIED = ev.Reconfigured(1, CHANGE, receipt(), "me", AT)


def carry_out(snapshot: Snapshot, command: ev.Apply, *events: ev.Event) -> Step:
    return play(snapshot, command, planned(snapshot, command), *events)


def ends(effects: tuple[ev.Effect, ...]) -> dict[str, object]:
    """Return what every operation came to: a result, or the code of a problem."""
    told: dict[str, object] = {}
    for effect in effects:
        if isinstance(effect, ev.Finish):
            told[effect.operation] = effect.result
        elif isinstance(effect, ev.Fail | ev.Reject):
            told[effect.operation] = effect.problem.code
    return told


def asked(snapshot: Snapshot, **fields: object) -> object:
    request = applies.merged(applies.newest(snapshot), ApplyRequest.parse(fields))
    return request.spec.model_dump(exclude_unset=True)


def test_a_live_change_is_asked_of_the_engine_and_wanted_from_then_on() -> None:
    changing, effects = carry_out(READY, WIDE)
    send = effects[-1]
    assert isinstance(send, ev.SendReconfigure)
    asked_for = send.change.model_dump(exclude_none=True)
    assert asked_for == {"n_ctx": 131072, "n_seq": 4, "dry_run": False}
    assert changing.desired == REQUEST, "not before the engine has done it"
    done, effects = play(changing, APPLIED)
    result = ends(effects)["o"]
    assert isinstance(result, ApplyResult)
    assert (result.applied, result.receipt) == (True, receipt())
    assert (done.state, done.desired, done.applying) == (EngineState.READY, WIDE.request, None)
    assert comes_to(done, WIDE.spec).action == "none"


def test_a_live_change_that_the_engine_declines_leaves_everything_as_it_was() -> None:
    after, effects = carry_out(READY, WIDE, ev.ReconfigureFailed(1, PROBLEM))
    assert ends(effects) == {"o": PROBLEM.code}
    assert after == replace(READY, facts_at=NOW)


def test_a_crash_soon_after_it_goes_back_to_the_geometry_before() -> None:
    done, _ = carry_out(READY, WIDE, APPLIED)
    crashed, _ = play(done, ev.Exited(1, RECORD, 0.5))
    assert crashed.deadline is not None
    _, effects = play(crashed, ev.Tick(), now=crashed.deadline)
    (spawned,) = [effect for effect in effects if isinstance(effect, ev.Spawn)]
    assert spawned.override is not None
    assert (spawned.override.n_ctx, spawned.override.n_seq) == (16384, 2)
    assert crashed.dropped is not None
    assert crashed.dropped.n_ctx == 131072


def test_a_cold_change_stops_the_engine_and_starts_the_other() -> None:
    stopping, effects = carry_out(READY, COLD, WRITTEN_OUT)
    assert effects[-1] == ev.Signal(process(1), ev.Ladder.TERM)
    started, effects = play(stopping, ev.Exited(1, RECORD, 0.5))
    (spawn,) = effects
    assert isinstance(spawn, ev.Spawn)
    assert (spawn.generation, spawn.request, spawn.override) == (2, OTHER, None)
    assert started.cause is ev.LoadCause.APPLY
    ready, effects = play(
        started, ev.Spawned(2, process(2), COLD.spec), ev.Healthy(2, FACTS, AT), now=NOW + 3
    )
    result = ends(effects)["o"]
    assert isinstance(result, ApplyResult)
    assert result.lifecycle is not None
    assert (result.lifecycle.load_s, result.lifecycle.pid) == (3.0, 1002)
    assert [reason.field for reason in result.plan.reasons] == ["--model"]
    assert comes_to(ready, COLD.spec).action == "none"


def test_how_long_the_port_was_closed_is_told_of_a_relaunch() -> None:
    """From the TERM of the one engine to the first answer of the next."""
    ending, _ = play(READY, COLD, planned(READY, COLD), WRITTEN_OUT, now=100.0)
    starting, _ = play(ending, ev.Exited(1, RECORD, 0.5), ev.Spawned(2, process(2)), now=100.5)
    loading, _ = play(starting, ev.Listens(2), now=101.0)
    _, effects = play(loading, ev.Listens(2), ev.Healthy(2, FACTS, AT), now=109.0)
    result = ends(effects)["o"]
    assert isinstance(result, ApplyResult)
    assert result.lifecycle is not None
    assert result.lifecycle.port_closed_s == 1.0
    assert [e.port_closed_s for e in effects if isinstance(e, ev.RecordLoad)] == [1.0]


def test_a_cold_change_that_would_lose_a_conversation_was_never_asked_for() -> None:
    ready, effects = carry_out(READY, COLD, ev.CarriedOut(1, ONE_LOST))
    assert ends(effects) == {"o": "carry_failed"}
    assert (ready.state, ready.desired, ready.applying) == (EngineState.READY, REQUEST, None)
    lossy = replace(COLD, accept_loss=True)
    _, effects = carry_out(READY, lossy, ev.CarriedOut(1, ONE_LOST))
    assert effects[-1] == ev.Signal(process(1), ev.Ladder.TERM)


@pytest.mark.parametrize("how", ["exits", "is not spawned", "stalls"])
def test_an_engine_that_does_not_load_gives_way_to_the_one_before(how: str) -> None:
    started, _ = carry_out(READY, COLD, ev.Exited(1, RECORD, 0.5))
    spawned, dies = ev.Spawned(2, process(2), COLD.spec), ev.Exited(2, RECORD, 0.5)
    events = {
        "exits": (spawned, dies),
        "is not spawned": (ev.SpawnFailed(2, PROBLEM, 0.5, final=True),),
        "stalls": (spawned, ev.Tick(), dies),
    }
    back, effects = play(started, *events[how], now=NOW + 61 if how == "stalls" else NOW)
    code = {"exits": "engine_exited", "is not spawned": PROBLEM.code, "stalls": "start_stalled"}
    assert ends(effects) == {"o": "apply_failed"}
    assert [e.problem.details["reason"] for e in effects if isinstance(e, ev.Fail)] == [code[how]]
    assert isinstance(effects[-1], ev.Spawn)
    assert effects[-1].request == REQUEST
    assert (back.state, back.desired, back.generation) == (EngineState.STARTING, REQUEST, 3)
    failed, _ = play(back, ev.Spawned(3, process(3), SPEC), ev.Exited(3, RECORD, 0.5))
    assert failed.state is EngineState.CRASHED, "the one before is tried as any other"


def test_what_is_so_already_ends_at_once() -> None:
    same = ev.Apply("o", REQUEST, SPEC, "me")
    after, effects = carry_out(READY, same)
    result = ends(effects)["o"]
    assert isinstance(result, ApplyResult)
    assert (result.applied, result.plan.action) == (False, "none")
    assert after == READY


def test_a_moved_model_is_wanted_where_it_is_now() -> None:
    moved = ev.Apply("o", OTHER, SPEC, "me")
    after, _ = carry_out(READY, moved)
    assert (after.desired, after.running, after.generation) == (OTHER, OTHER, 1)


def judged(snapshot: Snapshot, refused: frozenset[str]) -> tuple[Snapshot, dict[str, object]]:
    """Find out what each apply that waits comes to; return also how each has ended by then."""
    told: dict[str, object] = {}
    while snapshot.pending is not None and snapshot.pending.asked:
        command = snapshot.pending.commands[0]
        name = command.operation
        event = ev.Planned(name, PROBLEM) if name in refused else planned(snapshot, command)
        snapshot, effects = play(snapshot, event)
        told |= ends(effects)
    return snapshot, told


@pytest.mark.parametrize("refused", [frozenset(x) for x in ("", "1", "2", "3", "12", "13", "23")])
def test_of_those_that_wait_the_newest_that_can_be_is_carried_out(refused: frozenset[str]) -> None:
    burst = [replace(WIDE, operation=name) for name in ("1", "2", "3")]
    busy, _ = carry_out(READY, replace(COLD, operation="0"), WRITTEN_OUT)
    waiting, effects = play(busy, *burst)
    assert ends(effects) == {}, "nothing is lost before it is known of a newer one that it can be"
    loaded = (
        *(ev.Exited(1, RECORD, 0.5), ev.Spawned(2, process(2), COLD.spec)),
        ev.Healthy(2, FACTS, AT),
    )
    ready, effects = play(waiting, *loaded)
    assert set(ends(effects)) == {"0"}
    doing, told = judged(ready, refused)
    (best,) = sorted({"1", "2", "3"} - refused)[-1:]
    assert doing.applying is not None
    assert doing.applying.command.operation == best
    others = {name: "superseded" for name in "123" if name != best}
    assert told == others | dict.fromkeys(refused, PROBLEM.code)


def test_where_none_of_those_that_wait_can_be_nothing_changes() -> None:
    burst = [replace(WIDE, operation=name) for name in ("1", "2", "3")]
    waiting, _ = play(READY, *burst)
    after, told = judged(waiting, frozenset("123"))
    assert told == dict.fromkeys("123", PROBLEM.code)
    assert after == READY


def test_what_a_refused_one_asked_for_is_not_asked_for_by_the_next() -> None:
    wide, seq = replace(WIDE, operation="1"), replace(PATCH, operation="2")
    request = applies.merged(wide.request, seq.asked or ApplyRequest())
    on_top = replace(seq, request=request, spec=SPEC.with_geometry(131072, 3, None))
    waiting, _ = play(READY, wide, on_top)
    after, effects = play(waiting, ev.Planned("1", PROBLEM))
    assert effects == (ev.Fail("1", PROBLEM), ev.Rebase("2", PATCH.request))
    unheard, _ = play(after, ev.Rebased("1", PATCH.request, SPEC))
    assert unheard == after, "it is asked about another one"
    doing, effects = play(after, ev.Rebased("2", PATCH.request, PATCH.spec))
    assert isinstance(effects[-1], ev.PlanApply)
    assert [change.field for change in effects[-1].plan.changes] == ["n_seq"]
    _, effects = play(doing, planned(doing, replace(seq, operation="2")))
    (send,) = effects
    assert isinstance(send, ev.SendReconfigure)
    assert (send.operation, send.change.n_ctx, send.change.n_seq) == ("2", 16384, 3)
    refused, effects = play(after, ev.Rebased("2", PATCH.request, PROBLEM))
    assert (ends(effects), refused) == ({"2": PROBLEM.code}, READY)


def test_what_waits_is_on_top_of_what_was_changed_meanwhile() -> None:
    changed, effects = play(READY, ev.Reconfigure("r", CHANGE), PATCH, APPLIED)
    rebase = effects[-1]
    assert isinstance(rebase, ev.Rebase)
    assert (rebase.request.spec.n_ctx, rebase.request.spec.n_seq) == (131072, 3)
    assert comes_to(changed, PATCH.spec).action == "reconfigure", "as it came it would undo that"


def test_a_newer_one_takes_the_configuration_along_that_it_supersedes() -> None:
    older, newer = replace(WIDE, operation="1", config=CONFIG), replace(WIDE, operation="2")
    waiting, _ = play(READY, older, newer)
    doing, told = judged(waiting, frozenset())
    assert told == {"1": "superseded"}
    done, _ = play(doing, APPLIED)
    assert done.baseline == CONFIG.engine


def test_no_more_wait_than_can_be_judged() -> None:
    many = [replace(WIDE, operation=str(number)) for number in range(applies.APPLIES_MAX + 1)]
    waiting, effects = play(STATES["reconfiguring"], *many)
    assert ends(effects) == {str(applies.APPLIES_MAX): "operation_in_progress"}
    assert waiting.pending is not None
    assert waiting.pending.waiting == tuple(many[:-1])


def test_while_a_run_is_being_served_nothing_takes_its_place() -> None:
    after, effects = play(STATES["run asked"], WIDE)
    assert ends(effects) == {"o": "operation_in_progress"}
    assert after == STATES["run asked"]


def test_a_relaunch_of_the_engine_of_a_run_is_told_as_the_applys_that_asks_for_it() -> None:
    for state in ("owned", "lingering"):
        owned = STATES[state]
        cold = replace(COLD, request=COLD.request.model_copy(update={"context": CONTEXT}))
        ending, _ = carry_out(owned, cold, WRITTEN_OUT)
        busy = play(ending, ev.Reconfigure("r", CHANGE))[1]
        assert ends(busy) == {"r": "operation_in_progress"}
        after, _ = play(ending, ev.Exited(1, RECORD, 0.5))
        assert (after.state, after.cause) == (EngineState.STARTING, ev.LoadCause.APPLY)


def test_what_was_found_out_of_a_state_that_is_gone_is_found_out_again() -> None:
    planning, _ = play(READY, WIDE)
    other, _ = play(planning, ev.Reconfigure("r", CHANGE))
    waits, effects = play(other, planned(READY, WIDE))
    assert (ends(effects), waits.state) == ({}, EngineState.RECONFIGURING)
    ready, effects = play(waits, APPLIED)
    assert isinstance(effects[-1], ev.PlanApply)
    assert effects[-1].plan.action == "none"
    _, effects = play(ready, planned(ready, WIDE))
    assert isinstance(ends(effects)["o"], ApplyResult)


def test_what_was_found_out_before_another_change_came_is_not_carried_out() -> None:
    between = (ev.Reconfigure("r", CHANGE), APPLIED)
    after, effects = play(READY, WIDE, *between, planned(READY, WIDE))
    assert isinstance(effects[-1], ev.PlanApply)
    assert (effects[-1].plan.action, after.state) == ("none", EngineState.READY)


def test_what_cannot_be_had_ends_it_and_changes_nothing() -> None:
    after, effects = play(READY, WIDE, ev.Planned("o", PROBLEM))
    assert ends(effects) == {"o": PROBLEM.code}
    assert after == READY


def test_a_stop_supersedes_what_waits() -> None:
    stopping, effects = play(STATES["apply waits"], ev.Stop("s"))
    assert ends(effects) == {"a": "superseded"}
    assert (stopping.pending, stopping.changing) == (None, ("r",))


@pytest.mark.parametrize("state", ["writing to relaunch", "relaunching", "relaunched"])
def test_an_apply_that_a_stop_overtakes_ends_with_the_stop(state: str) -> None:
    generation = STATES[state].generation
    stopping, effects = play(STATES[state], ev.Stop("s"))
    assert ends(effects) == {}, "it is not known yet what comes of it"
    assert stopping.desired == REQUEST, "what comes to nothing is not wanted"
    spawned = () if generation == 1 else (ev.Spawned(2, process(2), SPEC),)
    stopped, effects = play(stopping, *spawned, WRITTEN_OUT, ev.Exited(generation, RECORD, 0.5))
    assert set(ends(effects)) == {"s", "a"}
    (failed,) = (effect for effect in effects if isinstance(effect, ev.Fail))
    assert (failed.operation, failed.problem.code) == ("a", "superseded")
    assert "the next start is what was wanted before" in failed.problem.message
    assert (stopped.state, stopped.intent) == (EngineState.STOPPED, Intent.DOWN)
    assert (stopped.desired, stopped.applying) == (REQUEST, None)


def test_a_live_apply_that_a_stop_overtakes_ends_as_the_engine_says() -> None:
    stopping, effects = play(STATES["applying"], ev.Stop("s"))
    assert ends(effects) == {}
    made, effects = play(stopping, APPLIED)
    result = ends(effects)["a"]
    assert isinstance(result, ApplyResult)
    assert (result.applied, result.receipt) == (True, receipt())
    assert (made.state, made.desired) == (EngineState.STOPPING, WIDE.request)
    declined, effects = play(stopping, ev.ReconfigureFailed(1, PROBLEM))
    assert (ends(effects), declined.desired) == ({"a": PROBLEM.code}, REQUEST)
    gone, effects = play(stopping, WRITTEN_OUT, ev.Exited(1, RECORD, 0.5))
    assert ends(effects)["a"] == "superseded"
    assert (gone.desired, gone.override, gone.applying) == (REQUEST, None, None)


def test_an_engine_that_is_not_stopped_after_all_is_wanted_as_it_was() -> None:
    kept = replace(STATES["relaunching"], state=EngineState.READY, waiting=(), deadline=None)
    assert kept.desired == OTHER
    after, _ = play(kept, ev.Tick())
    assert (after.desired, after.applying) == (REQUEST, None)


def test_without_an_engine_that_is_wanted_it_is_for_the_next_start() -> None:
    stopped, _ = play(READY, ev.Stop("s"), ev.Exited(1, RECORD, 0.5))
    after, effects = carry_out(stopped, COLD)
    result = ends(effects)["o"]
    assert isinstance(result, ApplyResult)
    assert (result.applied, result.plan.action) == (True, "store")
    assert (after.state, after.desired) == (EngineState.STOPPED, OTHER)


@pytest.mark.parametrize("state", ["crashed", "failed"])
def test_an_engine_that_crashed_is_started_with_what_is_applied(state: str) -> None:
    after, effects = carry_out(STATES[state], COLD)
    assert isinstance(effects[-1], ev.Spawn)
    assert effects[-1].request == OTHER
    assert (after.state, after.crashes) == (EngineState.STARTING, 0)


def test_an_engine_of_which_nothing_is_known_is_relaunched() -> None:
    plan = comes_to(replace(READY, running_spec=None), SPEC)
    assert (plan.action, [reason.field for reason in plan.reasons]) == ("relaunch", ["engine"])


def test_a_configuration_that_is_applied_is_in_force() -> None:
    command = replace(WIDE, config=CONFIG)
    done, _ = carry_out(READY, command, APPLIED)
    assert done.baseline == CONFIG.engine
    assert done.config is not None
    assert done.config.engine == CONFIG.engine


def test_a_patch_is_on_top_of_what_is_wanted_by_then() -> None:
    plain = REQUEST.spec.model_dump()
    assert asked(READY, engine={"port": 9}) == plain | {"port": 9}
    live, _ = play(READY, ev.Reconfigure("r", CHANGE), APPLIED)
    assert asked(live, engine={"port": 9}) == plain | {"n_ctx": 131072, "n_seq": 4, "port": 9}
    for state in ("applying", "apply waits", "planning"):
        wide = plain | {"n_ctx": 131072, "n_seq": 4, "port": 9}
        assert asked(STATES[state], engine={"port": 9}) == wide
    assert asked(STATES["relaunching"], engine={"port": 9}) == OTHER.spec.model_dump() | {"port": 9}


def test_a_replacement_keeps_the_model_and_the_binary_alone() -> None:
    live, _ = play(READY, ev.Reconfigure("r", CHANGE), APPLIED)
    replaced = asked(live, engine={"port": 9, "model": None}, replace=True)
    assert replaced == REQUEST.spec.model_dump() | {"port": 9}


def test_a_key_file_can_be_taken_away() -> None:
    keyed = REQUEST.model_copy(
        update={"spec": REQUEST.spec.model_copy(update={"api_key_file": "/k"})}
    )
    snapshot = replace(READY, desired=keyed)
    request = applies.merged(
        applies.newest(snapshot), ApplyRequest.parse({"engine": {"api_key_file": None}})
    )
    assert request.spec.api_key_file is None


def test_without_any_engine_known_it_has_to_be_whole() -> None:
    with pytest.raises(LlamactlError) as caught:
        asked(EMPTY, engine={"n_seq": 3})
    assert caught.value.code == "no_spec"
    engine = {"model": "/m.gguf", "engine_path": "/bin/llama-server"}
    assert asked(EMPTY, engine=engine) == REQUEST.spec.model_dump()


def test_the_end_of_another_process_does_not_end_a_relaunch() -> None:
    late = ExitRecord(summary="old", at=AT)
    before = STATES["relaunching"]
    assert play(before, ev.Exited(0, late, 0.5)) == (before, ())
    assert before.applying is not None
    assert before.applying.command == COLD_A
    assert STATES["planning"].pending is not None
    assert STATES["planning"].pending.waiting == (WIDE_A,)


def outcomes(effects: tuple[ev.Effect, ...]) -> dict[str, str]:
    told = (effect.lost for effect in effects if isinstance(effect, ev.RecordLost))
    return {lost.operation: lost.outcome for lost in told}


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ("ready", []),
        ("planning", [("a", False)]),
        ("applying", [("a", True)]),
        ("relaunched", [("a", False)]),
        ("stopping amid an apply", [("a", True)]),
        ("run asked", []),
    ],
)
def test_what_has_been_accepted_outlives_the_daemon(
    state: str, names: list[tuple[str, bool]]
) -> None:
    saved = durable.saved_of(STATES[state], change_by=None, load_by=None)
    assert [(each.operation, each.is_sent) for each in saved.applies] == names
    later = durable.snapshot_of(saved, SETTINGS, NOW)
    assert [(each.command.operation, each.is_sent) for each in later.lost] == names
    again = durable.saved_of(later, change_by=None, load_by=None)
    assert again.applies == saved.applies, "until it was told"


def test_what_came_of_one_that_a_daemon_died_over_is_told_once_it_shows() -> None:
    sent, waited = Unended(WIDE, is_sent=True), Unended(COLD_A)
    loading = replace(STATES["starting"], lost=(sent, waited))
    still, effects = play(loading, ev.Moved(1))
    assert (outcomes(effects), still.lost) == ({}, (sent, waited))
    ready, effects = play(still, ev.Healthy(1, FACTS, AT))
    assert (outcomes(effects), ready.lost) == ({"o": "open", "a": "lost"}, ())
    done, _ = carry_out(READY, WIDE, APPLIED)
    _, effects = play(replace(done, lost=(sent, waited)), ev.Tick())
    assert outcomes(effects) == {"o": "in_force", "a": "lost"}
    wanted = replace(READY, desired=COLD.request, lost=(waited,))
    _, effects = play(wanted, ev.Tick())
    assert outcomes(effects) == {"a": "wanted"}
    dead = replace(EMPTY, desired=REQUEST, lost=(sent,))
    found, effects = play(dead, ev.FoundDead(process(1), RECORD))
    assert (outcomes(effects), found.lost) == ({}, (sent,)), "it may be loaded again at once"
