"""The state machine's last geometry known good: what a crash after a change goes back to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llamactl_supervisor import events as ev
from llamactl_supervisor.models import (
    EngineState,
    ReconfigureRequest,
)
from machine import (
    AT,
    FACTS,
    NOW,
    OTHER,
    READY,
    RECORD,
    REQUEST,
    WEDGED,
    again,
    changed,
    observed,
    play,
    process,
    receipt,
)


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
    ready, _ = play(crashed, *events, now=NOW + 9)
    woke = replace(observed(NOW + 10, n_weight_loads=ready.loads_recorded + 1), generation=2)
    _, effects = play(ready, woke, now=NOW + 10)
    (woken,) = (effect for effect in effects if isinstance(effect, ev.RecordLoad))
    later, _ = play(ready, ev.Exited(2, RECORD, 0.5), now=NOW + 9)
    _, effects = play(
        later, ev.Tick(), ev.Spawned(3, process(3)), ev.Healthy(3, FACTS, AT), now=NOW + 99
    )
    (next_one,) = (effect for effect in effects if isinstance(effect, ev.RecordLoad))
    assert (woken.dropped, next_one.dropped) == (None, None), "it is told once"


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
