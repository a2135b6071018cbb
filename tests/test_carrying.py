"""The state machine while conversations are carried: what is refused, told, and lost by whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llamactl_supervisor import events as ev
from llamactl_supervisor.models import (
    After,
    ApplyResult,
    CarryFate,
    CarryReport,
    EngineState,
    Intent,
    LifecycleResult,
)
from machine import (
    ALL_BACK,
    ALL_KEPT,
    AT,
    BACK,
    COLD,
    EMPTY,
    FACTS,
    LOST,
    NOW,
    ONE_LOST,
    PROBLEM,
    QUIET,
    READY,
    RECORD,
    REQUEST,
    SETTINGS,
    STATES,
    WRITTEN_OUT,
    planned,
    play,
    process,
)

TERM = ev.Signal(process(1), ev.Ladder.TERM)


def result_of(effects: tuple[ev.Effect, ...], operation: str) -> LifecycleResult:
    (done,) = (e for e in effects if isinstance(e, ev.Finish) and e.operation == operation)
    assert isinstance(done.result, LifecycleResult)
    return done.result


def test_a_restart_carries_out_ends_loads_and_carries_in() -> None:
    writing, effects = play(READY, ev.Restart("r"))
    assert effects == (ev.CarryOut(1, process(1), REQUEST, may_lose=False, to=REQUEST),)
    ending, effects = play(writing, WRITTEN_OUT)
    assert effects == (ev.RecordCarried("out", ALL_KEPT), TERM)
    bringing, effects = play(
        ending,
        *(ev.Exited(1, RECORD, 0.5), ev.Spawned(2, process(2)), ev.Healthy(2, QUIET, AT)),
    )
    assert effects[-1] == ev.CarryIn(2, process(2), REQUEST)
    assert (bringing.state, bringing.waiting) == (EngineState.STARTING, ("r",))
    ready, effects = play(bringing, ev.CarriedIn(2, ALL_BACK, FACTS, AT))
    assert ready.state is EngineState.READY
    assert effects[-1] == ev.RecordCarried("in", ALL_BACK)
    carried = result_of(effects, "r").carried
    assert carried is not None
    assert (carried.conversations, carried.took_s, carried.quiet_s) == ((BACK,), 3.0, 3.0)
    assert (ready.carry, ready.carried) == (None, None)


def test_a_restart_that_would_lose_one_is_refused_and_names_it() -> None:
    ready, effects = play(READY, ev.Restart("r"), ev.CarriedOut(1, ONE_LOST))
    _, failed, goes_on = effects
    assert isinstance(failed, ev.Fail)
    assert (failed.operation, failed.problem.code) == ("r", "carry_failed")
    assert "page fox (40 tokens): there is no space for it" in failed.problem.message
    assert failed.problem.details["losses"] == [LOST.model_dump(mode="json")]
    assert goes_on == ev.CarryOff(process(1), REQUEST)
    assert (ready.state, ready.intent) == (EngineState.READY, Intent.UP)
    assert not ready.waiting
    again, effects = play(ready, ev.Restart("s", accept_loss=True), ev.CarriedOut(1, ONE_LOST))
    assert effects == (
        ev.CarryOut(1, process(1), REQUEST, may_lose=True),
        ev.RecordCarried("out", ONE_LOST),
        TERM,
    )
    _, effects = play(
        again,
        *(ev.Exited(1, RECORD, 0.5), ev.Spawned(2, process(2)), ev.Healthy(2, QUIET, AT)),
        ev.CarriedIn(2, ALL_BACK, FACTS, AT),
    )
    carried = result_of(effects, "s").carried
    assert carried is not None
    assert carried.conversations == (BACK, LOST)


@pytest.mark.parametrize("code", ["not_supported", "timed_out"])
def test_an_engine_that_could_not_be_asked_serves_on(code: str) -> None:
    report = CarryReport(problem=PROBLEM.model_copy(update={"code": code}))
    after, effects = play(READY, ev.Restart("r"), ev.CarriedOut(1, report))
    assert after.state is EngineState.READY
    assert TERM not in effects


def test_what_a_crash_took_along_is_told_to_who_has_it_loaded_again() -> None:
    crashed, _ = play(READY, ev.Exited(1, RECORD, 0.5))
    again, _ = play(crashed, ev.Restart("r"), ev.Spawned(2, process(2)))
    ready, effects = play(again, ev.Healthy(2, FACTS, AT))
    carried = result_of(effects, "r").carried
    assert carried is not None
    assert carried.has_losses
    assert carried.problem is not None
    assert carried.problem.message.endswith("all that it held in no file is lost")
    assert ready.carried is None
    failed, _ = play(STATES["starting"], ev.Exited(1, RECORD, 0.5))
    assert failed.carried is None, "it held nothing"


def test_an_engine_that_is_killed_while_an_apply_is_planned_is_told_of_by_that() -> None:
    asked, (effect,) = play(READY, COLD)
    assert isinstance(effect, ev.PlanApply)
    before = planned(asked, COLD)
    crashed, _ = play(asked, ev.Exited(1, RECORD, 0.5), before)
    starting, _ = play(crashed, planned(crashed, COLD), ev.Spawned(2, process(2)))
    _, effects = play(starting, ev.Healthy(2, FACTS, AT))
    (done,) = (e for e in effects if isinstance(e, ev.Finish))
    assert isinstance(done.result, ApplyResult)
    assert done.result.plan.action == "start"
    assert done.result.lifecycle is not None
    assert done.result.lifecycle.carried is not None
    assert done.result.lifecycle.carried.has_losses


def test_a_stop_cannot_be_refused_and_tells_what_is_lost() -> None:
    snapshot, effects = play(READY, ev.Stop("s"), ev.CarriedOut(1, ONE_LOST))
    assert effects[-1] == TERM
    _, effects = play(snapshot, ev.Exited(1, RECORD, 0.5))
    assert result_of(effects, "s").carried == ONE_LOST


@pytest.mark.parametrize("event", [ev.Stop("s"), ev.Down("s")])
def test_what_is_stopped_without_carrying_is_not_asked(event: ev.Event) -> None:
    settings = SETTINGS.model_copy(update={"carry_on_stop": False})
    plain = replace(READY, settings=settings)
    assert play(plain, event)[1] == (TERM,)
    assert isinstance(play(plain, ev.Restart("r"))[1][0], ev.CarryOut), "a restart always does"


def test_a_stop_that_overtakes_a_restart_keeps_what_can_be_kept() -> None:
    """The restart had stopped writing at the first loss."""
    snapshot, effects = play(READY, ev.Restart("r"), ev.Stop("s"), ev.CarriedOut(1, ONE_LOST))
    assert effects[-1] == ev.CarryOut(1, process(1), REQUEST, may_lose=True)
    _, effects = play(snapshot, ev.CarriedOut(1, ONE_LOST))
    assert effects[-1] == TERM


@pytest.mark.parametrize("event", [ev.Stop("s", now=True), ev.Down("s", now=True)])
def test_a_stop_that_does_not_wait_keeps_what_is_held(event: ev.Event) -> None:
    writing, effects = play(READY, event)
    assert effects == (ev.CarryOut(1, process(1), REQUEST, may_lose=True), ev.CarryCut(1))
    _, effects = play(writing, WRITTEN_OUT)
    assert effects == (ev.RecordCarried("out", ALL_KEPT), TERM)


@pytest.mark.parametrize("state", ["writing", "writing to restart"])
def test_who_waits_no_longer_gives_up_requests_first_and_then_what_is_in_no_file(
    state: str,
) -> None:
    waits = ev.CarryMoved(1, "waiting for 1 request to end", ONE_LOST)
    moved, _ = play(STATES[state], waits)
    waiting, effects = play(moved, ev.Stop("again"))
    assert waiting.carry is not None
    assert TERM not in effects
    cut, effects = play(waiting, ev.Stop("now", now=True))
    assert (effects[-1], TERM in effects) == (ev.CarryCut(1), False)
    ending, effects = play(cut, ev.Stop("now again", now=True))
    assert TERM in effects
    assert (ending.carry, ending.after) == (None, After.REST)
    stopped, effects = play(ending, ev.CarriedOut(1, ALL_KEPT), ev.Exited(1, RECORD, 0.5))
    assert stopped.state is EngineState.STOPPED
    for operation in ("now", "now again"):
        carried = result_of(effects, operation).carried
        assert carried is not None
        assert carried.problem is not None
        assert carried.problem.code == "superseded"
        assert carried.conversations == ONE_LOST.conversations


def test_once_requests_have_ended_it_is_the_writing_that_is_given_up() -> None:
    moved = ev.CarryMoved(1, "writing 2 of 2 conversations", ONE_LOST, is_drained=True)
    _, effects = play(STATES["writing"], moved, ev.Stop("now", now=True))
    record, term = effects
    assert isinstance(record, ev.RecordCarried)
    assert (record.report.conversations, term) == (ONE_LOST.conversations, TERM)


def test_what_nobody_could_name_is_told_as_that() -> None:
    now = ev.Stop("now", now=True)
    _, effects = play(STATES["writing"], now, now)
    (record,) = (e for e in effects if isinstance(e, ev.RecordCarried))
    assert record.report.problem is not None
    assert record.report.problem.message.endswith("is lost, and was not told")


def test_patience_with_a_carrying_is_for_each_step_of_it() -> None:
    writing, now = STATES["writing"], NOW
    for _ in range(5):
        now += 159
        moved = ev.CarryMoved(1, "writing 2 of 3 conversations", ONE_LOST)
        writing, effects = play(writing, ev.Tick(), moved, now=now)
        assert effects == ()
    assert writing.carry is not None
    assert writing.carry.progress == "writing 2 of 3 conversations"
    hung, effects = play(writing, ev.Tick(), now=now + 160)
    record, signal = effects
    assert isinstance(record, ev.RecordCarried)
    assert record.report.conversations == ONE_LOST.conversations
    assert record.report.problem is not None
    assert (record.report.problem.code, signal) == ("timed_out", TERM)
    assert play(hung, WRITTEN_OUT) == (hung, ()), "it comes too late"


def test_an_engine_that_dies_while_it_is_written_loses_the_rest_by_name() -> None:
    moved = ev.CarryMoved(1, "writing 2 of 2 conversations", ONE_LOST)
    stopped, effects = play(STATES["writing"], moved, ev.Exited(1, RECORD, 0.5))
    assert stopped.state is EngineState.STOPPED
    assert [type(e) for e in effects] == [ev.RecordCrash, ev.RecordCarried, ev.Finish]
    assert result_of(effects, "s").carried == ONE_LOST
    again, effects = play(STATES["writing to restart"], moved, ev.Exited(1, RECORD, 0.5))
    assert again.state is EngineState.STARTING
    assert [type(e) for e in effects] == [ev.RecordCrash, ev.RecordCarried, ev.Spawn]


def test_one_that_dies_while_conversations_come_back_lost_none() -> None:
    failed, effects = play(STATES["bringing back"], ev.Exited(1, RECORD, 0.5))
    assert failed.carry is None
    assert not [e for e in effects if isinstance(e, ev.RecordCarried)]


def test_a_load_takes_what_it_took_without_the_bringing_back() -> None:
    bringing, _ = play(EMPTY, ev.Up("u", REQUEST), ev.Spawned(1, process(1)))
    bringing, _ = play(bringing, ev.Healthy(1, QUIET, AT), now=NOW + 3)
    _, effects = play(bringing, ev.CarriedIn(1, ALL_BACK, FACTS, AT), now=NOW + 10)
    assert result_of(effects, "u").load_s == 3
    assert [e.load_s for e in effects if isinstance(e, ev.RecordLoad)] == [3]


@pytest.mark.parametrize("intent", Intent)
def test_a_new_daemon_ends_what_was_ending_and_nothing_twice(intent: Intent) -> None:
    """The TERM was decided: all that the engine held is in files."""
    saved = replace(EMPTY, generation=4, desired=REQUEST, intent=intent, loads_recorded=1)
    ending, effects = play(saved, ev.Found(process(4), stopping=After.START))
    assert [type(effect) for effect in effects] == [ev.Watch]
    assert ending.after is (After.START if intent is Intent.UP else After.REST)
    assert play(ending, ev.Tick(), now=NOW + 5)[1] == (ev.Signal(process(4), ev.Ladder.KILL),)


@pytest.mark.parametrize("state", ["restarting", "relaunching"])
def test_why_the_next_engine_is_loaded_outlives_the_daemon_that_ended_the_one_before(
    state: str,
) -> None:
    before = STATES[state]
    expected = play(before, ev.Exited(1, RECORD, 0.5))[0].cause
    assert expected is not READY.cause
    known = replace(STATES["wanted"], cause=before.cause)
    found, _ = play(known, ev.Found(process(1), stopping=After.START))
    assert play(found, ev.Exited(1, RECORD, 0.5))[0].cause is expected


def test_a_new_daemon_begins_a_stop_anew_that_had_not_come_to_the_term() -> None:
    saved = replace(EMPTY, generation=4, desired=REQUEST, loads_recorded=1)
    writing, effects = play(saved, ev.Found(process(4)))
    assert [type(effect) for effect in effects] == [ev.Watch, ev.CarryOut]
    assert (writing.state, writing.after) == (EngineState.STOPPING, After.REST)


def test_a_new_daemon_has_an_engine_go_on_that_was_made_quiet() -> None:
    """It has served: what it holds is not brought into it a second time."""
    saved = replace(
        EMPTY, generation=4, desired=REQUEST, intent=Intent.UP, loads_recorded=1, load_began=NOW
    )
    adopted, _ = play(saved, ev.Found(process(4)))
    ready, effects = play(adopted, ev.Healthy(4, QUIET, AT))
    assert ready.state is EngineState.READY
    assert effects == (ev.CarryOff(process(4), REQUEST),)
    loading, _ = play(replace(saved, loads_recorded=0), ev.Found(process(4)))
    _, effects = play(loading, ev.Healthy(4, QUIET, AT))
    assert effects == (ev.CarryIn(4, process(4), REQUEST),), "its load is not at its end"
    mine = process(4).model_copy(update={"adopted": True})
    loading, _ = play(replace(saved, loads_recorded=0), ev.Found(mine))
    _, effects = play(loading, ev.Healthy(4, FACTS, AT))
    assert effects[-1] == ev.CarryOff(mine, REQUEST), "it serves, and its files are forgotten"


def test_a_fate_is_found_by_its_name() -> None:
    assert ONE_LOST.of(CarryFate.LOST) == (LOST,)
    assert ONE_LOST.of(CarryFate.LOST, CarryFate.WRITTEN) == ONE_LOST.conversations
