"""The state machine where something goes wrong, or comes about without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamactl_supervisor import events as ev
from llamactl_supervisor.facts import NEW_LOADS_MAX, SOMEBODY
from llamactl_supervisor.models import (
    EngineState,
    Geometry,
    Problem,
)
from llamactl_supervisor.state import reduce
from machine import (
    AT,
    CHANGE,
    CHANGED,
    FACTS,
    MISSING,
    NOW,
    READY,
    RECORD,
    REQUEST,
    SETTINGS,
    STATES,
    WEDGED,
    again,
    observed,
    play,
    process,
    receipt,
)

# --- wedged --------------------------------------------------------------------------------------


def test_a_wedged_engine_is_stopped_and_loaded_again_as_one_that_crashed() -> None:
    stopping, effects = play(READY, ev.Wedged(1, WEDGED))
    assert effects == (ev.Signal(process(1), ev.Ladder.TERM),)
    assert stopping.problem == WEDGED
    stopping, effects = play(stopping, ev.Tick(), now=NOW + 5)
    assert effects == (ev.Signal(process(1), ev.Ladder.KILL),)
    crashed, effects = play(stopping, ev.Exited(1, RECORD, 0.5))
    assert (crashed.state, crashed.crashes, crashed.problem) == (EngineState.CRASHED, 1, WEDGED)
    (record,) = effects
    assert isinstance(record, ev.RecordCrash)
    assert (record.problem, record.record, record.cause) == (WEDGED, RECORD, "up")
    _, effects = play(crashed, ev.Tick(), ev.Spawned(2, process(2)), now=NOW + 99)
    loading = play(crashed, ev.Tick(), ev.Spawned(2, process(2)), now=NOW + 99)[0]
    assert loading.problem == WEDGED, "it says why it loads"
    ready, effects = play(loading, ev.Healthy(2, FACTS, AT), now=NOW + 100)
    assert ready.problem is None
    (load,) = (effect for effect in effects if isinstance(effect, ev.RecordLoad))
    assert (load.cause, load.loaded, load.load_s) == (ev.LoadCause.WEDGE, True, 1.0)


def test_an_engine_that_wedges_again_and_again_ends_in_failed() -> None:
    snapshot = READY
    for generation in (1, 2):
        wedged = ev.Wedged(generation, WEDGED), ev.Exited(generation, RECORD, 0.5)
        snapshot, _ = again(play(snapshot, *wedged)[0], NOW + 9)
    snapshot, _ = play(snapshot, ev.Wedged(3, WEDGED), ev.Exited(3, RECORD, 0.5))
    assert (snapshot.state, snapshot.problem) == (EngineState.FAILED, WEDGED)


def test_what_waits_for_a_wedged_engine_ends_with_the_reason() -> None:
    for state, waits in (("reconfiguring", "r"), ("paging", "p")):
        _, effects = play(STATES[state], ev.Wedged(1, WEDGED), ev.Exited(1, RECORD, 0.5))
        assert ev.Fail(waits, WEDGED) in effects


def test_a_stop_of_a_wedged_engine_is_a_stop() -> None:
    stopped, effects = play(STATES["replacing"], ev.Stop("s"), ev.Exited(1, RECORD, 0.5))
    assert stopped.state is EngineState.STOPPED
    assert [type(effect) for effect in effects] == [ev.Finish], "asked for: no crash"


# --- loads ---------------------------------------------------------------------------------------


def test_an_adopted_engine_that_served_before_must_answer_soon() -> None:
    """One that was still loading when its daemon died may take as long as a load."""
    for loads_recorded, patience_s in ((1, SETTINGS.wedge_idle_s), (0, SETTINGS.ready_stall_s)):
        wanted = replace(STATES["wanted"], loads_recorded=loads_recorded)
        adopted, _ = play(wanted, ev.Found(process(1)))
        assert adopted.deadline == NOW + patience_s
        adopted, _ = play(adopted, ev.Moved(1), now=NOW + 1)
        assert adopted.deadline == NOW + 1 + patience_s
        stopping, effects = play(adopted, ev.Tick(), now=NOW + 1 + patience_s)
        assert effects == (ev.Signal(process(1), ev.Ladder.TERM),)
        assert stopping.problem is not None
        assert f"for {patience_s:g} s" in stopping.problem.message
        assert play(stopping, ev.Exited(1, RECORD, 0.5))[0].state is EngineState.CRASHED


# --- crashes -------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 179), min_size=20, max_size=20), st.floats(0, 0.999))
def test_an_engine_that_never_lives_for_minutes_ends_in_failed(
    lives_s: list[float], jitter: float
) -> None:
    snapshot, now = READY, NOW
    for number, life_s in enumerate(lives_s, start=1):
        now += life_s
        snapshot, _ = reduce(snapshot, ev.Tick(), now)
        snapshot, _ = reduce(snapshot, ev.Exited(number, RECORD, jitter), now)
        assert snapshot.crashes == number
        if snapshot.state is EngineState.FAILED:
            assert number == SETTINGS.crashes_max + 1
            assert snapshot.deadline is None
            return
        assert snapshot.deadline is not None
        assert now <= snapshot.deadline <= now + SETTINGS.backoff_cap_s
        now = snapshot.deadline
        snapshot, _ = again(snapshot, now)
    raise AssertionError("it is loaded for ever")


def test_a_load_that_failed_is_forgotten_once_one_succeeds_and_an_end_of_service_is_not() -> None:
    patient = replace(READY, settings=SETTINGS.model_copy(update={"crashes_max": 9}))
    snapshot, _ = again(play(patient, ev.Exited(1, RECORD, 0.5))[0], NOW)
    assert (snapshot.crashes, snapshot.cause) == (1, ev.LoadCause.CRASH)
    served, _ = play(snapshot, ev.Exited(2, RECORD, 0.5))
    assert served.crashes == 2
    assert served.deadline is not None
    loading, _ = play(served, ev.Tick(), now=served.deadline)
    failed, _ = play(loading, ev.SpawnFailed(3, MISSING, 0.5), now=served.deadline)
    assert (failed.crashes, failed.cause) == (3, ev.LoadCause.CRASH)
    assert failed.deadline is not None
    ready, _ = again(failed, failed.deadline)
    assert ready.crashes == 2


@given(st.lists(st.floats(180, 1e6), min_size=20, max_size=20))
def test_a_crash_after_minutes_of_service_is_the_first_one(lives_s: list[float]) -> None:
    snapshot, now = READY, NOW
    for number, life_s in enumerate(lives_s, start=1):
        assert snapshot.deadline is not None
        snapshot, _ = reduce(snapshot, ev.Tick(), snapshot.deadline)
        now += life_s
        snapshot, _ = reduce(snapshot, ev.Exited(number, RECORD, 0.5), now)
        assert (snapshot.state, snapshot.crashes) == (EngineState.CRASHED, 1)
        assert snapshot.deadline == now + 0.5
        now += 0.5
        snapshot, _ = again(snapshot, now)


def test_only_an_end_that_nobody_asked_for_leaves_a_record() -> None:
    for state in ("stopping", "restarting", "going down"):
        _, effects = play(STATES[state], ev.Exited(1, RECORD, 0.5))
        assert not any(isinstance(effect, ev.RecordCrash) for effect in effects), state
    for state in ("starting", "ready", "reconfiguring", "load stalled", "replacing"):
        _, effects = play(STATES[state], ev.Exited(1, RECORD, 0.5))
        (record,) = (effect for effect in effects if isinstance(effect, ev.RecordCrash))
        assert record.record == RECORD
    spawning = STATES["spawning"]
    _, effects = play(spawning, ev.SpawnFailed(1, WEDGED, 0.5))
    assert not any(isinstance(effect, ev.RecordCrash) for effect in effects), "there was none"


# --- loads that nobody asked for -----------------------------------------------------------------


def loads(effects: tuple[ev.Effect, ...]) -> list[tuple[str, float | None]]:
    return [(e.cause, e.load_s) for e in effects if isinstance(e, ev.RecordLoad)]


def test_a_wake_is_a_weight_load_and_is_recorded_once() -> None:
    snapshot, effects = play(READY, observed(), observed(n_weight_loads=2, wake_s=4.5))
    assert loads(effects) == [("wake", 4.5)]
    assert snapshot.facts.n_weight_loads == 2
    assert play(snapshot, observed(n_weight_loads=2))[1] == ()
    _, effects = play(snapshot, observed(n_weight_loads=4, wake_s=4.5))
    assert loads(effects) == [("wake", None)] * 2, "nobody saw how long each of two took"


@pytest.mark.parametrize("seen", [(), (observed(n_weight_loads=2, wake_s=4.5),)])
@pytest.mark.parametrize("outcome", ["applied", "unchanged", "planned"])
def test_a_reconfigure_that_woke_the_engine_is_a_load_and_avoids_none(
    seen: tuple[ev.Event, ...], outcome: str
) -> None:
    woken = receipt(outcome).model_copy(update={"n_weight_loads": 2})
    changed = ev.Reconfigured(1, CHANGE, woken, "me", AT)
    snapshot, effects = play(READY, ev.Reconfigure("r", CHANGE), *seen, changed)
    assert loads(effects) == [("wake", None)]
    assert [effect.by for effect in effects if isinstance(effect, ev.RecordLoad)] == ["me"]
    assert not [effect for effect in effects if isinstance(effect, ev.RecordAvoided)]
    told = woken if outcome == "applied" else None
    assert play(snapshot, observed(NOW + 1, n_weight_loads=2, last_reconfigure=told))[1] == ()


@pytest.mark.parametrize("n_weight_loads", [None, 0, -7, 1])
def test_an_engine_that_counts_no_loads_has_loaded_once(n_weight_loads: int | None) -> None:
    facts = replace(FACTS, n_weight_loads=n_weight_loads)
    _, effects = play(STATES["starting"], ev.Healthy(1, facts, AT))
    assert loads(effects) == [("up", 0.0)]


def test_a_count_that_makes_no_sense_does_not_fill_the_ledger() -> None:
    snapshot, effects = play(READY, observed(n_weight_loads=2**62))
    assert len(effects) == NEW_LOADS_MAX
    assert play(snapshot, observed(n_weight_loads=2**62))[1] == ()


def test_what_happened_while_no_daemon_lived_is_recorded_by_the_next() -> None:
    """Two wakes and a change; the load itself is in the ledger since before."""
    adopted, _ = play(STATES["wanted"], ev.Found(process(1)))
    facts = replace(FACTS, n_weight_loads=3, last_reconfigure=receipt())
    ready, effects = play(adopted, ev.Healthy(1, facts, AT))
    assert effects[0] == ev.RecordAvoided(receipt(), SOMEBODY)
    assert loads(effects) == [("wake", None)] * 2
    assert ready.override is not None
    assert (ready.override.n_ctx, ready.override.by) == (131072, SOMEBODY)


def test_a_load_that_outlives_its_daemon_is_recorded_by_the_next() -> None:
    adopted, _ = play(replace(STATES["wanted"], loads_recorded=0), ev.Found(process(1)))
    assert loads(play(adopted, ev.Healthy(1, FACTS, AT))[1]) == [("adopt", None)]


# --- changes that nobody told of -----------------------------------------------------------------


def test_a_change_over_the_engines_socket_is_found_and_held_to() -> None:
    snapshot, effects = play(
        READY, observed(geometry=receipt().geometry, last_reconfigure=receipt())
    )
    assert effects == (ev.RecordAvoided(receipt(), SOMEBODY),)
    assert snapshot.facts.geometry == receipt().geometry
    assert snapshot.override is not None
    assert (snapshot.override.n_ctx, snapshot.override.n_seq) == (131072, 4)
    assert snapshot.override.by == SOMEBODY
    grown = receipt().model_copy(update={"outside_pause_ms": {"free": 3.0}})
    later = observed(geometry=receipt().geometry, last_reconfigure=grown)
    snapshot, effects = play(snapshot, later)
    assert effects == (), "the engine's account of a change grows once the old contexts are freed"
    assert snapshot.facts.last_reconfigure == grown


def test_a_change_that_outlived_its_daemon_is_of_whoever_asked_for_it() -> None:
    adopted, _ = play(replace(STATES["wanted"], change_by="uid 7"), ev.Found(process(1)))
    found = receipt().model_copy(
        update={
            "previous": Geometry(n_ctx=16384, n_seq=4, kv_unified=False),
            "geometry": Geometry(n_ctx=131072, n_seq=4, kv_unified=False),
        }
    )
    ready, effects = play(adopted, ev.Healthy(1, replace(FACTS, last_reconfigure=found), AT))
    assert effects[0] == ev.RecordAvoided(found, "uid 7")
    assert ready.override is not None
    assert (ready.override.by, ready.override.n_ctx) == ("uid 7", 131072)
    assert ready.override.kv_unified is None, "nobody set it"
    again = receipt().model_copy(update={"pause_ms": 1.0})
    _, effects = play(ready, observed(NOW, last_reconfigure=again))
    assert effects == (ev.RecordAvoided(again, SOMEBODY),), "that was somebody else"


def test_our_own_change_is_not_found_a_second_time() -> None:
    """Seen in the engine before its answer came, and asked before but told after."""
    changing, _ = play(READY, ev.Reconfigure("r", CHANGE))
    early = observed(geometry=receipt().geometry, last_reconfigure=receipt())
    changing, effects = play(changing, early)
    assert effects == ()
    changed, effects = play(changing, CHANGED, now=NOW + 1)
    assert [type(effect) for effect in effects] == [ev.RecordAvoided, ev.Finish]
    assert play(changed, observed(NOW + 0.5), now=NOW + 2) == (changed, ()), "that is old"
    fresh = observed(NOW + 2, geometry=receipt().geometry, last_reconfigure=receipt())
    assert play(changed, fresh, now=NOW + 2)[1] == ()


def test_a_final_failure_is_not_tried_again() -> None:
    restarting, _ = play(READY, ev.Restart("x"), ev.Exited(1, RECORD, 0.5))
    failed, effects = play(restarting, ev.SpawnFailed(2, WEDGED, 0.5, final=True))
    assert failed.state is EngineState.FAILED
    assert ev.Fail("x", WEDGED) in effects


def test_a_missing_file_is_looked_for_until_it_is_there_and_then_tried_once() -> None:
    lacking = replace(STATES["lacking files"], crashes=SETTINGS.crashes_max + 1)
    cap_s = SETTINGS.backoff_cap_s
    assert lacking.deadline == NOW + cap_s
    looking, (look,) = play(lacking, ev.Tick(), now=NOW + cap_s)
    assert (look, looking.deadline) == (ev.LookForFiles(1, REQUEST), None), "one look at a time"
    again, effects = play(looking, ev.LookedForFiles(1, there=False), now=NOW + 100)
    assert (again.state, again.deadline, effects) == ("failed", NOW + 100 + cap_s, ())
    started, (spawn,) = play(again, ev.LookedForFiles(1, there=True), now=NOW + 100)
    assert isinstance(spawn, ev.Spawn)
    loaded, _ = play(started, ev.Spawned(2, process(2)), ev.Exited(2, RECORD, 0.5), now=NOW + 101)
    assert (loaded.state, loaded.deadline) == ("failed", None), "no second load"
    assert play(loaded, ev.LookedForFiles(1, there=True)) == (loaded, ())
    gone = replace(lacking, settings=SETTINGS.model_copy(update={"on_failed": "exit"}))
    assert play(gone, ev.LookedForFiles(1, there=True)) == (gone, ())


# --- a disk that takes nothing -------------------------------------------------------------------


FULL = Problem(code="state_unwritable", message="full")


def test_a_state_that_cannot_be_saved_costs_no_try_and_more_and_more_time() -> None:
    crashed, waits_s, at = STATES["crashed"], [], NOW
    for generation in (2, 3, 4, 5):
        assert crashed.deadline is not None
        at = crashed.deadline
        tick = reduce(crashed, ev.Tick(), at)[0]
        assert tick.problem == crashed.problem, "it is still why nothing runs"
        crashed, _ = play(tick, ev.SpawnFailed(generation, FULL, 0.5), now=at)
        assert (crashed.state, crashed.crashes) == (EngineState.CRASHED, 1)
        assert crashed.deadline is not None
        waits_s.append(crashed.deadline - at)
    assert waits_s == [1.0, 2.0, 4.0, 8.0]
    ready, _ = play(
        reduce(crashed, ev.Tick(), crashed.deadline or 0.0)[0],
        *(ev.Spawned(6, process(6)), ev.Healthy(6, FACTS, AT)),
    )
    assert (ready.state, ready.deferred) == (EngineState.READY, 0)


@pytest.mark.parametrize("command", [ev.Up("o", REQUEST), ev.Start("o"), ev.Restart("o")])
def test_a_load_that_the_disk_puts_off_is_told_at_once_and_stays_what_it_was(
    command: ev.Command,
) -> None:
    wanted = replace(STATES["failed"], generation=7)
    after, effects = play(wanted, command, ev.SpawnFailed(8, FULL, 0.5))
    cause = after.cause
    (told,) = (effect for effect in effects if isinstance(effect, ev.Fail))
    assert (told.operation, told.problem.code) == ("o", "state_unwritable")
    for generation in (9, 10):
        assert (after.state, after.cause) == (EngineState.CRASHED, cause)
        assert after.deadline is not None
        after, more = play(after, ev.Tick(), now=after.deadline)
        after, last = play(after, ev.SpawnFailed(generation, FULL, 0.5))
        effects += (*more, *last)
    tried = [effect for effect in effects if isinstance(effect, ev.RecordLoad)]
    assert [effect.cause for effect in tried] == [cause], "one line of the ledger"
    again, _ = play(after, ev.Start("again"), ev.SpawnFailed(11, FULL, 0.5))
    assert again.state is EngineState.CRASHED, "a start in vain is not the end of it"
