"""The state machine where something goes wrong, or comes about without it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamactl_supervisor import events as ev
from llamactl_supervisor.facts import NEW_LOADS_MAX, SOMEBODY
from llamactl_supervisor.models import EngineState, ReconfigureRequest
from llamactl_supervisor.state import reduce
from machine import (
    AT,
    CHANGE,
    FACTS,
    NOW,
    OTHER,
    READY,
    RECORD,
    REQUEST,
    SETTINGS,
    STATES,
    WEDGED,
    play,
    process,
    receipt,
)

if TYPE_CHECKING:
    from llamactl_supervisor.snapshot import Snapshot

CHANGED = ev.Reconfigured(1, CHANGE, receipt(), "me", AT)


def observed(now: float = NOW, wake_s: float | None = None, **facts: object) -> ev.Observed:
    return ev.Observed(1, replace(FACTS, **facts), now, AT, wake_s)  # type: ignore[arg-type]


def again(crashed: Snapshot, now: float) -> tuple[Snapshot, ev.Spawn]:
    """Let the retry come due; return the engine that is ready then, and how it was started."""
    assert crashed.deadline is not None
    snapshot, effects = reduce(crashed, ev.Tick(), max(now, crashed.deadline))
    (spawn,) = (effect for effect in effects if isinstance(effect, ev.Spawn))
    here = spawn.generation
    events = ev.Spawned(here, process(here)), ev.Healthy(here, FACTS, AT)
    return play(snapshot, *events, now=now)[0], spawn


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
    _, effects = play(STATES["reconfiguring"], ev.Wedged(1, WEDGED))
    assert effects == (ev.Fail("r", WEDGED), ev.Signal(process(1), ev.Ladder.TERM))
    _, effects = play(STATES["paging"], ev.Wedged(1, WEDGED))
    assert effects[0] == ev.Fail("p", WEDGED)


def test_a_stop_of_a_wedged_engine_is_a_stop() -> None:
    stopped, effects = play(STATES["replacing"], ev.Stop("s"), ev.Exited(1, RECORD, 0.5))
    assert stopped.state is EngineState.STOPPED
    assert [type(effect) for effect in effects] == [ev.Finish], "asked for: no crash"


# --- loads ---------------------------------------------------------------------------------------


def test_a_daemon_that_did_not_run_itself_gives_up_no_load() -> None:
    """The deadline passed while nobody looked: the engine has all its time again."""
    starting = STATES["starting"]
    later, effects = play(starting, ev.Tick(), now=NOW + 3600)
    assert (later.state, later.deadline, effects) == (EngineState.STARTING, NOW + 3660, ())
    _, effects = play(later, ev.Tick(), now=NOW + 3660)
    assert effects == (ev.Signal(process(1), ev.Ladder.TERM),)


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


def test_a_reconfigure_that_woke_the_engine_is_a_load_as_well() -> None:
    woken = receipt().model_copy(update={"n_weight_loads": 2})
    changed = ev.Reconfigured(1, CHANGE, woken, "me", AT)
    snapshot, effects = play(READY, ev.Reconfigure("r", CHANGE), changed)
    assert loads(effects) == [("wake", None)]
    assert play(snapshot, observed(NOW + 1, n_weight_loads=2, last_reconfigure=woken))[1] == ()


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


# --- the last geometry known good ----------------------------------------------------------------


def changed(snapshot: Snapshot, n_ctx: int, now: float) -> Snapshot:
    here = snapshot.generation
    change = ReconfigureRequest(n_ctx=n_ctx, n_seq=4)
    done = ev.Reconfigured(here, change, receipt(), "me", AT)
    return play(snapshot, ev.Reconfigure("r", change), done, now=now)[0]


def test_a_crash_soon_after_a_change_goes_back_to_the_geometry_before() -> None:
    big = changed(READY, 131072, NOW)
    crashed, _ = play(big, ev.Exited(1, RECORD, 0.5), now=NOW + 599)
    assert crashed.state is EngineState.CRASHED
    assert crashed.problem is not None
    assert "soon after its geometry was changed to n_ctx 131072, n_seq 4 (by me)" in (
        crashed.problem.message
    )
    assert crashed.problem.message.endswith("it goes back to n_ctx 16384, n_seq 2")
    assert crashed.dropped == big.override
    ready, spawn = again(crashed, NOW + 600)
    assert (spawn.override, ready.override) == (None, None)
    assert ready.dropped == big.override, "it is told until the next change"
    second, _ = play(ready, ev.Exited(2, RECORD, 0.5), now=NOW + 601)
    assert (second.state, second.crashes) == (EngineState.CRASHED, 2)
    assert second.problem is not None
    assert "geometry" not in second.problem.message
    assert changed(ready, 65536, NOW + 601).dropped is None


def test_the_load_after_it_says_what_it_is_without() -> None:
    big = changed(READY, 131072, NOW)
    crashed, _ = play(big, ev.Exited(1, RECORD, 0.5))
    events = ev.Tick(), ev.Spawned(2, process(2)), ev.Healthy(2, FACTS, AT)
    _, effects = play(crashed, *events, now=NOW + 9)
    (load,) = (effect for effect in effects if isinstance(effect, ev.RecordLoad))
    assert (load.cause, load.dropped) == (ev.LoadCause.CRASH, big.override)
    assert (load.spec.n_ctx, load.spec.n_seq) == (16384, 2)


def test_a_wedge_soon_after_a_change_goes_back_as_well() -> None:
    big = changed(READY, 131072, NOW)
    crashed, _ = play(big, ev.Wedged(1, WEDGED), ev.Exited(1, RECORD, 0.5), now=NOW + 60)
    assert (crashed.override, crashed.dropped) == (None, big.override)


def test_a_geometry_that_has_lived_is_the_next_one_known_good() -> None:
    good = changed(READY, 65536, NOW)
    big = changed(good, 131072, NOW + 600)
    crashed, _ = play(big, ev.Exited(1, RECORD, 0.5), now=NOW + 700)
    assert (crashed.override, crashed.dropped) == (good.override, big.override)
    kept, _ = play(good, ev.Exited(1, RECORD, 0.5), now=NOW + 600)
    assert (kept.override, kept.dropped) == (good.override, None)


def test_two_changes_on_trial_go_back_to_before_both() -> None:
    second = changed(changed(READY, 65536, NOW), 131072, NOW + 60)
    crashed, _ = play(second, ev.Exited(1, RECORD, 0.5), now=NOW + 120)
    assert (crashed.override, crashed.dropped) == (None, second.override)


def test_a_change_back_is_none_to_go_back_from() -> None:
    change = ReconfigureRequest(n_ctx=16384, n_seq=2)
    done = ev.Reconfigured(1, change, receipt(), "me", AT)
    back, _ = play(changed(READY, 65536, NOW), ev.Reconfigure("r", change), done, now=NOW + 1)
    crashed, _ = play(back, ev.Exited(1, RECORD, 0.5), now=NOW + 2)
    assert crashed.dropped is None
    assert crashed.problem is not None
    assert "geometry" not in crashed.problem.message


def test_a_load_that_dies_of_the_geometry_goes_back_too() -> None:
    big = changed(READY, 131072, NOW)
    loading, _ = play(big, ev.Restart("x"), ev.Exited(1, RECORD, 0.5), ev.Spawned(2, process(2)))
    assert loading.override == big.override
    crashed, effects = play(loading, ev.Exited(2, RECORD, 0.5))
    assert (crashed.override, crashed.dropped) == (None, big.override)
    (failed,) = (effect for effect in effects if isinstance(effect, ev.RecordLoad))
    assert (failed.loaded, failed.spec.n_ctx) == (False, 131072), "the one that was tried"


@pytest.mark.parametrize("command", [ev.Restart("x"), ev.Start("x")])
def test_a_load_long_after_the_change_goes_back_and_is_tried_again(command: ev.Command) -> None:
    """It lived in the engine that it was set in; no load has ever had it."""
    observed = ev.Observed(1, FACTS, NOW + 900, AT)
    big, _ = play(changed(READY, 131072, NOW), observed, now=NOW + 900)
    assert (big.trial_ends, big.override is None) == (None, False)
    down = [ev.Stop("s")] if isinstance(command, ev.Start) else [command]
    gone, _ = play(big, *down, ev.Exited(1, RECORD, 0.5), now=NOW + 901)
    if isinstance(command, ev.Start):
        gone, _ = play(gone, command, now=NOW + 902)
    loading, _ = play(gone, ev.Spawned(2, process(2)), now=NOW + 903)
    assert loading.override == big.override
    crashed, effects = play(loading, ev.Exited(2, RECORD, 0.5), now=NOW + 904)
    assert crashed.state is EngineState.CRASHED
    assert (crashed.override, crashed.dropped) == (None, big.override)
    assert crashed.waiting == ("x",), "whoever asked for it waits for the next load"
    assert not [effect for effect in effects if isinstance(effect, ev.Fail)]
    again, (spawned,) = play(crashed, ev.Tick(), now=NOW + 999)
    assert again.state is EngineState.STARTING
    assert isinstance(spawned, ev.Spawn)
    assert spawned.override is None


def test_a_load_long_after_goes_back_to_what_was_live_before() -> None:
    good = changed(READY, 65536, NOW)
    big, _ = play(
        changed(good, 131072, NOW + 700), ev.Observed(1, FACTS, NOW + 1500, AT), now=NOW + 1500
    )
    loading, _ = play(
        big, ev.Restart("x"), ev.Exited(1, RECORD, 0.5), ev.Spawned(2, process(2)), now=NOW + 1501
    )
    crashed, _ = play(loading, ev.Exited(2, RECORD, 0.5), now=NOW + 1502)
    assert (crashed.override, crashed.dropped) == (good.override, big.override)


def test_a_final_failure_is_not_tried_again() -> None:
    restarting, _ = play(READY, ev.Restart("x"), ev.Exited(1, RECORD, 0.5))
    failed, effects = play(restarting, ev.SpawnFailed(2, WEDGED, 0.5, final=True))
    assert failed.state is EngineState.FAILED
    assert ev.Fail("x", WEDGED) in effects


def test_a_geometry_that_is_asked_for_expressly_takes_the_place_of_one_set_live() -> None:
    crashed, _ = play(changed(READY, 131072, NOW), ev.Exited(1, RECORD, 0.5), now=NOW + 700)
    assert crashed.override is not None
    _, (kept,) = play(crashed, ev.Up("o", REQUEST))
    _, (exact,) = play(crashed, ev.Up("o", REQUEST, exact=True))
    assert isinstance(kept, ev.Spawn)
    assert isinstance(exact, ev.Spawn)
    assert (kept.override, exact.override) == (crashed.override, None)


def test_a_spawn_that_failed_says_nothing_of_the_geometry() -> None:
    big = changed(READY, 131072, NOW)
    restarting, _ = play(big, ev.Restart("x"), ev.Exited(1, RECORD, 0.5))
    crashed, _ = play(restarting, ev.SpawnFailed(2, WEDGED, 0.5))
    assert (crashed.override, crashed.dropped) == (big.override, None)


def test_another_engine_has_no_geometry_to_go_back_to() -> None:
    crashed, _ = play(changed(READY, 131072, NOW), ev.Exited(1, RECORD, 0.5))
    fresh, _ = play(crashed, ev.Up("o", OTHER))
    assert (fresh.dropped, fresh.trial_ends, fresh.last_good) == (None, None, None)


def test_a_stop_of_a_load_is_no_crash_of_its_geometry() -> None:
    big = changed(READY, 131072, NOW)
    stopped, _ = play(big, ev.Stop("s"), ev.Exited(1, RECORD, 0.5))
    assert (stopped.override, stopped.dropped) == (big.override, None)
