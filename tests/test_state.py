"""The state machine: every state with every event, and what no sequence of events may do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llamactl_supervisor import applies
from llamactl_supervisor import events as ev
from llamactl_supervisor.config import Config
from llamactl_supervisor.launch import live_spec
from llamactl_supervisor.models import (
    After,
    EngineState,
    Intent,
    LifecycleResult,
    OperationKind,
    Problem,
)
from llamactl_supervisor.snapshot import (
    ANSWERING,
    IDLE,
    PAGING_MAX,
    SERVING,
    Snapshot,
    lacks_files,
)
from llamactl_supervisor.state import reduce
from machine import (
    ALL_BACK,
    ALL_KEPT,
    AT,
    CHANGE,
    CONFIG,
    EMPTY,
    EVENTS,
    FACTS,
    MISSING,
    NOW,
    ONE_LOST,
    OTHER,
    PAGED,
    PROBLEM,
    QUIET,
    READY,
    RECORD,
    REQUEST,
    SETTINGS,
    STATES,
    WEDGED,
    WRITTEN,
    WRITTEN_OUT,
    planned,
    play,
    process,
    receipt,
    renamed,
    up,
)


def check(before: Snapshot, event: ev.Event, now: float) -> Snapshot:
    """Reduce, and hold the step against everything that must always be true."""
    after, effects = reduce(before, event, now)
    spawns = [effect for effect in effects if isinstance(effect, ev.Spawn)]
    signals = [effect for effect in effects if isinstance(effect, ev.Signal)]
    ends = [e.operation for e in effects if isinstance(e, ev.Finish | ev.Fail | ev.Reject)]

    assert after.generation - before.generation == len(spawns) <= 1
    if spawns:
        ended = isinstance(event, ev.Exited | ev.SpawnFailed)
        assert before.state in IDLE or ended, "a second engine beside the first"
        assert after.state is EngineState.STARTING
        assert after.process is None
    for effect in signals:
        known = event.process if isinstance(event, ev.Spawned | ev.Found) else before.process
        assert effect.process == known, "a signal to a stranger"
    assert sum(effect.step is ev.Ladder.TERM for effect in signals) <= 1
    if after.state in IDLE:
        assert after.process is None
    assert len(set(ends)) == len(ends), "an operation ended twice"
    left, was = operations(after), operations(before)
    assert len(set(left)) == len(left)
    assert not set(ends) & set(left), "an ended operation still waits"
    assert not set(was) - set(left) - set(ends), "an operation was forgotten"
    if after.applying is not None:
        assert after.applying.command.operation in (*after.waiting, *after.changing)
    reads = {effect.operation for effect in effects if isinstance(effect, ev.ReadConfig)}
    assert not {*before.reloads} - {*after.reloads} - reads, "a reload was forgotten"
    if isinstance(event, ev.Command):
        where = [event.operation in set_ for set_ in (ends, left, reads)]
        assert where.count(True) == 1
    if isinstance(event, ev.ConfigRead | ev.ConfigBroken):
        where = [event.operation in set_ for set_ in (ends, left, after.reloads)]
        assert where.count(True) == 1
    assert after.reloading is not None or not after.reloads
    check_hand_over(after, event, effects)
    if after.reloading is not None and after.state is not EngineState.RECONFIGURING:
        assert after.changing == (after.reloading.operation,)
    assert after.process is None or after.desired is None or after.running is not None
    if after.state not in ANSWERING:
        assert not (*after.paging, *after.changing), "an answer is awaited of no engine"
    assert len(after.paging) <= PAGING_MAX
    if after.state in {EngineState.STOPPED, EngineState.READY, EngineState.FAILED}:
        assert not after.waiting
    check_deadlines(after)
    check_carry(after, effects)
    check_owner(after, effects)
    return after


def check_owner(after: Snapshot, effects: tuple[ev.Effect, ...]) -> None:
    """An owner has an engine or waits for one; without an engine nothing lingers."""
    if after.owner is not None:
        assert applies.waits(after, after.owner.id) or (after.state not in IDLE and after.is_run)
    if after.state in IDLE:
        assert after.lingering is None
    if after.is_run and any(isinstance(effect, ev.Spawn) for effect in effects):
        assert after.owner is not None or after.cause is ev.LoadCause.RESTART, "for nobody"


def check_carry(after: Snapshot, effects: tuple[ev.Effect, ...]) -> None:
    """Conversations are on their way in two states only, and no TERM comes in the middle of it."""
    if after.carry is not None:
        assert after.state in {EngineState.STARTING, EngineState.STOPPING}
        assert after.process is not None
        assert after.deadline is not None
        assert not [effect for effect in effects if isinstance(effect, ev.Signal)]
    asked = [effect for effect in effects if isinstance(effect, ev.CarryOut | ev.CarryIn)]
    assert len(asked) <= 1
    assert not asked or after.carry is not None


def operations(snapshot: Snapshot) -> list[str]:
    """Return the operations that have not ended."""
    pending = () if snapshot.pending is None else snapshot.pending.waiting
    older = () if snapshot.applying is None else snapshot.applying.older
    applies = [each.operation for each in (*older, *pending)]
    return [*snapshot.waiting, *snapshot.paging, *snapshot.changing, *applies]


def check_deadlines(after: Snapshot) -> None:
    """Hold a snapshot against what may be waited for in its state."""
    if after.state in {EngineState.STARTING, EngineState.CRASHED}:
        assert after.deadline is not None
    if after.state is EngineState.STOPPED:
        assert after.deadline is None
    if after.state is EngineState.FAILED and after.deadline is not None:
        assert lacks_files(after), "nothing is looked for"
    if after.trial_ends is not None:
        assert after.override is not None, "no geometry is on trial"


def check_hand_over(after: Snapshot, event: ev.Event, effects: tuple[ev.Effect, ...]) -> None:
    """What is handed over is not touched; the daemon ends, but not in the middle of a change."""
    if isinstance(event, ev.HandOver):
        assert not [effect for effect in effects if isinstance(effect, ev.Spawn | ev.Signal)]
    if after.leaving and not after.closing:
        settled = after.state is not EngineState.RECONFIGURING and not after.changing
        assert (ev.Exit() in effects) is settled


@pytest.mark.parametrize("event", EVENTS, ids=repr)
@pytest.mark.parametrize("state", STATES)
def test_every_state_takes_every_event(state: str, event: ev.Event) -> None:
    for now in (NOW, NOW + 10_000):
        check(STATES[state], event, now)


class World:
    """The processes as they really are; the machine is told the truth, and old truths again."""

    def __init__(self) -> None:
        self.generation, self.phase = 0, "none"

    def facts(self) -> list[ev.Event]:
        """Return what could be reported now."""
        here = self.generation
        stale = [event for event in EVENTS if getattr(event, "generation", here) < here]
        if self.phase == "spawning":
            failed = ev.SpawnFailed(here, PROBLEM, 0.1)
            lacking = ev.SpawnFailed(here, MISSING, 0.1)
            return [*stale, failed, lacking, ev.Spawned(here, process(here))]
        if self.phase == "running":
            exited, healthy = ev.Exited(here, RECORD, 0.9), ev.Healthy(here, FACTS, AT)
            done = ev.Reconfigured(here, CHANGE, receipt(), "me", AT)
            failed_change = ev.ReconfigureFailed(here, PROBLEM)
            later = replace(FACTS, n_weight_loads=2, last_reconfigure=receipt())
            observed = ev.Observed(here, later, NOW, AT)
            wedged = ev.Wedged(here, WEDGED)
            lost, gone = ev.HolderLost(here), ev.SocketGone(here, PROBLEM, AT)
            said: list[ev.Event] = [
                exited,
                healthy,
                done,
                failed_change,
                lost,
                gone,
                observed,
                wedged,
            ]
            carried: list[ev.Event] = [
                ev.Healthy(here, QUIET, AT),
                ev.CarryMoved(here, "writing", ONE_LOST),
                ev.CarriedOut(here, ALL_KEPT),
                ev.CarriedOut(here, ONE_LOST),
                ev.CarriedIn(here, ALL_BACK, FACTS, AT),
            ]
            return [*stale, *said, *carried]
        return stale

    def happened(self, event: ev.Event, effects: tuple[ev.Effect, ...]) -> None:
        """Follow the event, then what the machine wants done about it."""
        if getattr(event, "generation", None) == self.generation:
            if isinstance(event, ev.Spawned):
                self.phase = "running"
            if isinstance(event, ev.Exited | ev.SpawnFailed):
                self.phase = "none"
        for effect in effects:
            if isinstance(effect, ev.Spawn):
                assert self.phase == "none", "a second engine beside the first"
                self.generation, self.phase = effect.generation, "spawning"
            if isinstance(effect, ev.Signal):
                assert self.phase == "running", "a signal to nobody"
                assert effect.process.engine == process(self.generation).engine
            if isinstance(effect, ev.Exit):
                assert self.phase == "none", "the daemon leaves an engine behind"


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 400)), max_size=80))
def test_no_sequence_breaks_the_invariants(steps: list[tuple[int, float]]) -> None:
    snapshot, world, now = EMPTY, World(), NOW
    for number, (choice, passed_s) in enumerate(steps):
        now += passed_s
        commands: list[ev.Event] = [event for event in EVENTS if isinstance(event, ev.Command)]
        pending = snapshot.pending
        for each in () if pending is None else pending.waiting[:2]:
            name, request = each.operation, each.request
            commands += [planned(snapshot, each), ev.Planned(name, PROBLEM)]
            commands += [ev.Rebased(name, request, each.spec), ev.Rebased(name, request, PROBLEM)]
        paged = [ev.PageEnded(name, PAGED) for name in snapshot.paging]
        configs = [ev.ConfigRead(f"c{number}", CONFIG), ev.ConfigRead(f"c{number}", Config())]
        possible = [*commands, *paged, *world.facts(), *world.facts(), ev.Tick(), ev.Resume()]
        possible += [*configs, ev.Pressure()]
        if snapshot.owner is not None:
            possible += [ev.Left(snapshot.owner.id)] * 3
        event = possible[choice % len(possible)]
        if isinstance(event, ev.Command):
            event = renamed(event, f"o{number}")
        _, effects = reduce(snapshot, event, now)
        snapshot = check(snapshot, event, now)
        world.happened(event, effects)
        assert (snapshot.state in IDLE) == (world.phase == "none")
        assert snapshot.generation == world.generation


def test_up_ready_down() -> None:
    snapshot, effects = play(EMPTY, ev.Up("up", REQUEST))
    assert (snapshot.state, snapshot.intent) == (EngineState.STARTING, Intent.UP)
    assert [type(effect) for effect in effects] == [ev.Spawn]
    snapshot, effects = play(snapshot, ev.Spawned(1, process(1)), ev.Healthy(1, FACTS, AT))
    assert snapshot.state is EngineState.READY
    assert [type(e) for e in effects] == [ev.Watch, ev.Finish, ev.RecordLoad]
    snapshot, effects = play(snapshot, ev.Down("d"), WRITTEN_OUT, ev.Exited(1, RECORD, 0.5))
    assert (snapshot.state, snapshot.intent) == (EngineState.STOPPED, Intent.DOWN)
    done = [ev.CarryOut, ev.RecordCarried, ev.Signal, ev.Finish, ev.Exit]
    assert [type(e) for e in effects] == done


def test_the_ladder_is_term_then_kill_and_never_a_second_term() -> None:
    snapshot, effects = play(READY, ev.Stop("s"), WRITTEN_OUT)
    assert effects[-1] == ev.Signal(process(1), ev.Ladder.TERM)
    assert play(snapshot, ev.Tick(), now=NOW + 4.9)[1] == ()
    snapshot, effects = play(snapshot, ev.Stop("t"), ev.Tick(), now=NOW + 5.1)
    assert effects == (ev.Signal(process(1), ev.Ladder.KILL),)
    assert play(snapshot, ev.Stop("u"), ev.Tick(), now=NOW + 99)[1] == ()
    ended = [e for e in play(snapshot, ev.Exited(1, RECORD, 0.5))[1] if isinstance(e, ev.Finish)]
    assert [effect.operation for effect in ended] == ["s", "t"]


def test_a_stop_before_the_pid_is_known_waits_for_it() -> None:
    snapshot, effects = play(EMPTY, ev.Up("up", REQUEST), ev.Stop("s"))
    assert [type(effect) for effect in effects] == [ev.Spawn, ev.Fail]
    _, effects = play(snapshot, ev.Spawned(1, process(1)))
    assert effects[-1] == ev.Signal(process(1), ev.Ladder.TERM)


def test_a_load_that_moves_is_not_given_up() -> None:
    starting = STATES["starting"]
    for now in range(1000, 2000, 50):
        starting, effects = play(starting, ev.Tick(), ev.Moved(1), now=float(now))
        assert effects == ()
    starting, effects = play(starting, ev.Tick(), now=1950.0 + 60.0)
    assert effects == (ev.Signal(process(1), ev.Ladder.TERM),)
    failed, effects = play(starting, ev.Exited(1, RECORD, 0.5))
    assert failed.state is EngineState.FAILED
    assert [e.problem.code for e in effects if isinstance(e, ev.Fail)] == ["start_stalled"]


def test_a_first_load_that_dies_is_told_at_once_and_not_retried() -> None:
    snapshot, effects = play(EMPTY, *up(), ev.Exited(1, RECORD, 0.5))
    assert snapshot.state is EngineState.FAILED
    failed = [effect for effect in effects if isinstance(effect, ev.Fail)]
    assert failed[0].problem.code == "engine_exited"
    assert failed[0].problem.details["last_lines"] == ["oops"]


def test_crashes_are_retried_until_the_budget_is_gone() -> None:
    snapshot = READY
    for generation, bound_s in ((1, 1.0), (2, 2.0)):
        snapshot, _ = play(snapshot, ev.Exited(generation, RECORD, 0.5))
        assert snapshot.state is EngineState.CRASHED
        assert snapshot.deadline == NOW + 0.5 * bound_s
        assert snapshot.deadline is not None
        snapshot, effects = play(snapshot, ev.Tick(), now=snapshot.deadline)
        assert [type(effect) for effect in effects] == [ev.Spawn]
        snapshot, _ = play(
            snapshot,
            ev.Spawned(generation + 1, process(generation + 1)),
            ev.Healthy(generation + 1, FACTS, AT),
        )
    snapshot, _ = play(snapshot, ev.Exited(3, RECORD, 0.5))
    assert snapshot.state is EngineState.FAILED
    assert snapshot.intent is Intent.UP


def test_only_minutes_of_ready_forgive_a_crash() -> None:
    crashed = STATES["crashed"]
    assert crashed.deadline is not None
    again, _ = play(crashed, ev.Tick(), now=crashed.deadline)
    again, _ = play(again, ev.Spawned(2, process(2)), ev.Healthy(2, FACTS, AT), now=NOW + 10)
    assert play(again, ev.Tick(), now=NOW + 189)[0].crashes == 1
    assert play(again, ev.Tick(), now=NOW + 190)[0].crashes == 0


def test_a_second_up_is_already_up_or_a_conflict() -> None:
    _, effects = play(READY, ev.Up("a", REQUEST), ev.Up("b", OTHER))
    first, second = effects
    assert isinstance(first, ev.Finish)
    assert isinstance(first.result, LifecycleResult)
    assert first.result.outcome == "already_up"
    assert isinstance(second, ev.Reject)
    assert second.problem.code == "conflict"
    assert "/other.gguf" in second.problem.message


def test_a_conflict_is_told_in_words_of_json_and_toml() -> None:
    fields: dict[str, object] = {"kv_unified": True, "api_key_file": "/k", "extra_args": ("-x",)}
    spec = REQUEST.spec.model_copy(update=fields)
    asked = REQUEST.model_copy(update={"spec": spec})
    _, (refused,) = play(READY, ev.Up("b", asked))
    assert isinstance(refused, ev.Reject)
    assert refused.problem.message == (
        "another engine is up: kv_unified is absent, asked for true; "
        'extra_args is [], asked for ["-x"]; api_key_file is absent, asked for "/k"'
    )


def test_an_applied_change_holds_over_a_restart() -> None:
    done = ev.Reconfigured(1, CHANGE, receipt(), "me", AT)
    snapshot, effects = play(READY, ev.Reconfigure("r", CHANGE), done)
    assert snapshot.state is EngineState.READY
    assert [type(e) for e in effects] == [ev.SendReconfigure, ev.RecordAvoided, ev.Finish]
    assert snapshot.override is not None
    assert (snapshot.override.n_ctx, snapshot.override.n_seq) == (131072, 4)
    _, effects = play(snapshot, ev.Restart("x"), ev.Exited(1, RECORD, 0.5))
    assert isinstance(effects[-1], ev.Spawn)
    assert effects[-1].override == snapshot.override


@pytest.mark.parametrize("outcome", ["planned"])
def test_a_plan_changes_nothing(outcome: str) -> None:
    done = ev.Reconfigured(1, CHANGE, receipt(outcome), "me", AT)
    snapshot, effects = play(READY, ev.Reconfigure("r", CHANGE), done)
    assert snapshot == READY
    assert [type(effect) for effect in effects] == [ev.SendReconfigure, ev.Finish]


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("stopped", "engine_stopped"),
        ("crashed", "engine_stopped"),
        ("failed", "engine_stopped"),
        ("stopping", "engine_stopped"),
        ("starting", "operation_in_progress"),
        ("reconfiguring", "operation_in_progress"),
        ("going down", "shutting_down"),
    ],
)
def test_a_reconfigure_out_of_turn_says_why(state: str, code: str) -> None:
    _, effects = play(STATES[state], ev.Reconfigure("r", CHANGE))
    assert isinstance(effects[0], ev.Reject)
    assert effects[0].problem.code == code


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("stopped", "engine_stopped"),
        ("crashed", "engine_stopped"),
        ("failed", "engine_stopped"),
        ("stopping", "engine_stopped"),
        ("restarting", "engine_stopped"),
        ("starting", "operation_in_progress"),
        ("going down", "shutting_down"),
    ],
)
def test_a_page_verb_out_of_turn_says_why(state: str, code: str) -> None:
    for verb in (
        ev.Page("p", OperationKind.PAGE_DROP, "fox"),
        ev.PageFile("p", OperationKind.PAGE_SAVE, "fox", 1),
    ):
        _, effects = play(STATES[state], verb)
        assert isinstance(effects[0], ev.Reject)
        assert effects[0].problem.code == code


def test_a_page_verb_and_a_reconfigure_do_not_wait_for_each_other() -> None:
    command = ev.PageFile("q", OperationKind.PAGE_RESTORE, "fox", 0)
    changing, effects = play(STATES["paging"], ev.Reconfigure("r", CHANGE), command)
    assert changing.state is EngineState.RECONFIGURING
    assert effects == (
        ev.SendReconfigure(1, process(1), "r", CHANGE),
        ev.SendPage(process(1), command),
    )
    changed, ends = play(
        changing, ev.PageEnded("q", WRITTEN), ev.Reconfigured(1, CHANGE, receipt(), "me", AT)
    )
    assert [end.operation for end in ends if isinstance(end, ev.Finish)] == ["q", "r"]
    assert (changed.state, changed.paging) == (EngineState.READY, ("p",))


def test_no_more_page_verbs_wait_than_the_engine_has_threads_for() -> None:
    verbs = [ev.Page(f"p{n}", OperationKind.PAGE_OUT, "fox", 0) for n in range(PAGING_MAX + 1)]
    snapshot, effects = play(READY, *verbs)
    assert snapshot.paging == tuple(verb.operation for verb in verbs[:-1])
    assert isinstance(effects[-1], ev.Reject)
    assert effects[-1].problem.code == "operation_in_progress"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (ev.Stop("s"), "superseded"),
        (ev.Restart("s"), "superseded"),
        (ev.Down("s"), "superseded"),
        (ev.Exited(1, RECORD, 0.5), "engine_exited"),
    ],
)
def test_a_page_verb_ends_with_the_engine_and_once(event: ev.Event, code: str) -> None:
    lost = Problem(code="engine_unreachable", message="the connection is closed")
    snapshot, effects = play(
        STATES["paging"], event, ev.PageEnded("p", lost), ev.Exited(1, RECORD, 0.5)
    )
    (failed,) = (effect for effect in effects if isinstance(effect, ev.Fail))
    assert (failed.operation, failed.problem.code) == ("p", code)
    assert play(snapshot, ev.PageEnded("p", PAGED)) == (snapshot, ())


@pytest.mark.parametrize(
    ("state", "n_ctx"),
    [
        ("stopping amid a change", CHANGE.n_ctx),
        ("stopping amid a reload", CONFIG.engine.n_ctx),
    ],
)
def test_a_change_that_was_made_while_a_stop_came_is_told_and_kept(state: str, n_ctx: int) -> None:
    made, effects = play(STATES[state], ev.Reconfigured(1, CHANGE, receipt(), "me", AT))
    (finished,) = (effect for effect in effects if isinstance(effect, ev.Finish))
    assert finished.operation == "r"
    stopped, effects = play(made, ev.Exited(1, RECORD, 0.5))
    assert [effect.operation for effect in effects if isinstance(effect, ev.Finish)] == ["s"]
    assert stopped.desired is not None
    asked = live_spec(stopped.desired.spec, stopped.override)
    assert (stopped.state, asked.n_ctx) == (EngineState.STOPPED, n_ctx)


@pytest.mark.parametrize("state", ["stopping amid a change", "stopping amid a reload"])
def test_a_change_that_a_stop_cut_short_is_told_so_and_is_not_kept(state: str) -> None:
    before = STATES[state]
    lost = Problem(code="engine_unreachable", message="the connection is closed")
    waits, effects = play(before, ev.ReconfigureFailed(1, lost))
    assert (waits, effects) == (before, ()), "no answer says neither"
    stopped, effects = play(waits, ev.Exited(1, RECORD, 0.5))
    (failed,) = (effect for effect in effects if isinstance(effect, ev.Fail))
    assert (failed.operation, failed.problem.code) == ("r", "superseded")
    assert (stopped.override, stopped.desired) == (before.override, before.desired)
    late = ev.Reconfigured(1, CHANGE, receipt(), "me", AT)
    assert play(stopped, late) == (stopped, ())


def test_a_found_engine_is_adopted_or_ended_as_was_intended() -> None:
    saved = replace(EMPTY, generation=4, desired=REQUEST, intent=Intent.UP, loads_recorded=1)
    adopted, effects = play(saved, ev.Found(process(4)))
    assert [type(effect) for effect in effects] == [ev.Watch]
    ready, effects = play(adopted, ev.Healthy(4, FACTS, AT))
    assert ready.state in SERVING
    assert [type(effect) for effect in effects] == [ev.CarryOff], "an adoption is no weight load"
    down = replace(saved, intent=Intent.DOWN)
    ending, effects = play(down, ev.Found(process(4), stopping=After.REST))
    assert ending.after is After.REST
    assert [type(effect) for effect in effects] == [ev.Watch], "its TERM was sent before"
    _, effects = play(ending, ev.Tick(), now=NOW + 5)
    assert effects == (ev.Signal(process(4), ev.Ladder.KILL),)


def test_a_hand_over_ends_the_daemon_and_keeps_what_is_wanted() -> None:
    after, effects = reduce(READY, ev.HandOver(), NOW)
    assert effects == (ev.Exit(),)
    assert replace(after, leaving=False) == READY


def test_a_hand_over_waits_for_a_change_and_lets_no_other_begin() -> None:
    changing, effects = play(READY, ev.Reconfigure("r", CHANGE), ev.HandOver())
    assert ev.Exit() not in effects
    _, (rejected,) = reduce(changing, ev.Restart("o"), NOW)
    assert isinstance(rejected, ev.Reject)
    assert rejected.problem.code == "shutting_down"
    after, effects = reduce(changing, ev.Reconfigured(1, CHANGE, receipt(), "me", AT), NOW)
    assert [type(effect) for effect in effects] == [ev.RecordAvoided, ev.Finish, ev.Exit]
    assert after.override is not None


def test_a_full_stop_wins_over_a_hand_over() -> None:
    changing, _ = play(READY, ev.Reconfigure("r", CHANGE), ev.HandOver())
    after, effects = reduce(changing, ev.Down("d"), NOW)
    assert (after.state, after.intent) == (EngineState.STOPPING, Intent.DOWN)
    assert ev.Exit() not in effects
    assert ev.Exit() in reduce(after, ev.Exited(1, RECORD, 0.5), NOW)[1]


def test_a_reload_beside_another_is_read_once_more_when_that_has_ended() -> None:
    both, effects = play(READY, ev.ConfigRead("r", CONFIG), ev.ConfigRead("q", CONFIG))
    assert [type(effect) for effect in effects] == [ev.SendReconfigure]
    for end in (
        ev.Reconfigured(1, CHANGE, receipt(), "me", AT),
        ev.ReconfigureFailed(1, PROBLEM),
        ev.Exited(1, RECORD, 0.5),
    ):
        after, effects = reduce(both, end, NOW)
        assert ev.ReadConfig("q") in effects
        assert after.reloads == ()


def test_an_engine_that_was_given_up_ends_the_daemon_where_that_is_wanted() -> None:
    settings = SETTINGS.model_copy(update={"on_failed": "exit"})
    failed, effects = play(replace(EMPTY, settings=settings), *up(), ev.Exited(1, RECORD, 0.5))
    assert failed.state is EngineState.FAILED
    assert effects[-1] == ev.Exit()
    assert ev.Exit() not in play(EMPTY, *up(), ev.Exited(1, RECORD, 0.5))[1]
