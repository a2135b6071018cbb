"""The state machine of a new daemon: what ended, or was begun, while none lived."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from llamactl_supervisor import events as ev
from llamactl_supervisor.models import (
    After,
    EngineState,
    Intent,
)
from llamactl_supervisor.snapshot import doing
from machine import (
    AT,
    CHANGED,
    CONFIG,
    FACTS,
    NOW,
    READY,
    RECORD,
    REQUEST,
    SETTINGS,
    STATES,
    changed,
    play,
    process,
)


def test_a_stop_that_a_daemon_did_not_live_to_end_goes_on_as_what_it_was() -> None:
    wanted = STATES["wanted"]
    for stopping, state in ((After.REPLACE, "crashed"), (After.START, "starting")):
        found, effects = play(wanted, ev.Found(process(1), stopping=stopping))
        assert (found.state, found.deadline) == ("stopping", NOW + SETTINGS.stop_term_s)
        assert effects == (ev.Watch(1, process(1)),), "no second TERM"
        killed, effects = play(found, ev.Tick(), now=NOW + SETTINGS.stop_term_s)
        assert effects == (ev.Signal(process(1), ev.Ladder.KILL),)
        assert play(killed, ev.Exited(1, RECORD, 0.5))[0].state == state
    down = replace(wanted, intent=Intent.DOWN)
    found, _ = play(down, ev.Found(process(1), stopping=After.REPLACE))
    assert play(found, ev.Exited(1, RECORD, 0.5))[0].state is EngineState.STOPPED


def test_an_engine_that_died_unwatched_counts_as_crashed() -> None:
    dead = ev.FoundDead(process(1), RECORD)
    snapshot, effects = play(STATES["wanted"], dead, ev.Resume())
    assert (snapshot.state, snapshot.crashes, snapshot.cause) == ("starting", 1, "crash")
    record, spawn = effects
    assert isinstance(record, ev.RecordCrash)
    assert (record.process, record.record) == (process(1), RECORD)
    assert isinstance(spawn, ev.Spawn)
    idle, effects = play(STATES["wanted"], dead, ev.Resume(load=False))
    assert (idle.state, idle.crashes, len(effects)) == (EngineState.STOPPED, 1, 1)
    assert idle.problem is not None
    assert idle.problem.message == "the engine exited with status 1 while no daemon ran"
    spent = replace(STATES["wanted"], crashes=SETTINGS.crashes_max)
    failed, effects = play(spent, dead, ev.Resume())
    assert (failed.state, [type(e) for e in effects]) == ("failed", [ev.RecordCrash])


@pytest.mark.parametrize(
    ("after_s", "known", "kept"), [(1, True, False), (99, False, False), (99, True, True)]
)
def test_a_geometry_on_trial_is_in_doubt_where_its_engine_died_unwatched(
    after_s: float, *, known: bool, kept: bool
) -> None:
    """Where nobody knows when it died, it is in doubt too."""
    settings = SETTINGS.model_copy(update={"override_trial_s": 60})
    changed = replace(play(READY, CHANGED)[0], state=EngineState.STOPPED, settings=settings)
    before = replace(changed, process=None, trial_ends=NOW + 60)
    record = RECORD.model_copy(
        update={"at": AT + timedelta(seconds=after_s), "exit_code": 1 if known else None}
    )
    after, effects = play(before, ev.FoundDead(process(1), record), ev.Resume())
    assert (after.override is not None) is kept
    assert (after.dropped is None) is kept
    (spawn,) = (effect for effect in effects if isinstance(effect, ev.Spawn))
    assert spawn.override == after.override


def test_a_geometry_that_killed_a_load_unwatched_is_left_for_the_one_before_it() -> None:
    """However long ago it was set; a load that a person asked for is then made again."""
    big = changed(READY, 131072, NOW)
    small = changed(big, 32768, NOW + 700)
    loading = replace(small, state=EngineState.STOPPED, process=None, trial_ends=None)
    loading = replace(loading, loads_recorded=0, cause=ev.LoadCause.START)
    record = RECORD.model_copy(update={"at": AT + timedelta(days=1)})
    after, effects = play(loading, ev.FoundDead(process(1), record), ev.Resume())
    assert (after.state, after.cause, after.crashes) == ("starting", "crash", 1)
    assert (after.override, after.dropped) == (big.override, small.override)
    assert [type(effect) for effect in effects] == [ev.RecordCrash, ev.RecordLoad, ev.Spawn]


def test_a_geometry_that_was_proven_before_a_crash_unwatched_can_still_fail_in_its_load() -> None:
    small = changed(changed(READY, 131072, NOW), 32768, NOW + 700)
    lost = replace(small, state=EngineState.STOPPED, process=None)
    record = RECORD.model_copy(update={"at": AT + timedelta(days=1)})
    loading, _ = play(lost, ev.FoundDead(process(1), record), ev.Resume(), now=NOW + 701)
    assert loading.override == small.override
    crashed, _ = play(
        *(loading, ev.Spawned(2, process(2)), ev.Exited(2, RECORD, 0.5)), now=NOW + 702
    )
    assert (crashed.override, crashed.dropped) == (small.last_good, small.override)


def test_what_was_given_up_waits_for_a_person_or_another_configuration() -> None:
    failed = replace(STATES["failed"], baseline=CONFIG.engine)
    for event in (ev.Resume(), ev.Resume(CONFIG)):
        held, effects = play(failed, event)
        assert (held.state, held.problem, effects) == ("failed", failed.problem, ())
    other = CONFIG.engine.model_copy(update={"model": "/n.gguf", "engine_path": "/e"})
    after, effects = play(failed, ev.Resume(CONFIG.model_copy(update={"engine": other})))
    assert (after.state, [type(effect) for effect in effects]) == ("starting", [ev.Spawn])
    assert play(failed, ev.Start("s"))[0].state is EngineState.STARTING


def test_an_engine_that_runs_is_taken_over_and_does_not_start() -> None:
    adopted, _ = play(STATES["wanted"], ev.Found(process(1)))
    assert doing(adopted) == "the running engine is taken over"
    assert doing(STATES["starting"]) == "the engine is starting"


def test_a_load_goes_on_as_what_it_was_begun_for() -> None:
    loading = replace(STATES["wanted"], running=REQUEST, loads_recorded=0, cause=ev.LoadCause.START)
    loading = replace(loading, load_began=NOW - 7)
    _, effects = play(loading, ev.Found(process(1)), ev.Healthy(1, FACTS, AT))
    (load,) = (effect for effect in effects if isinstance(effect, ev.RecordLoad))
    assert (load.cause, load.load_s, load.loaded) == (ev.LoadCause.START, 7.0, True)


def test_a_load_that_no_engine_came_of_is_made_again_as_what_it_was() -> None:
    configured = CONFIG.engine.request(REQUEST.engine_path)
    begun = replace(STATES["wanted"], desired=configured, loads_recorded=0)
    begun = replace(begun, cause=ev.LoadCause.START)
    for event in (ev.Resume(begun=True), ev.Resume(CONFIG, begun=True)):
        assert play(begun, event)[0].cause is ev.LoadCause.START
    assert play(begun, ev.Resume())[0].cause is ev.LoadCause.RESUME
    other = CONFIG.model_copy(
        update={"engine": CONFIG.engine.model_copy(update={"model": "/n.gguf"})}
    )
    assert play(begun, ev.Resume(other, begun=True))[0].cause is ev.LoadCause.CONFIG
