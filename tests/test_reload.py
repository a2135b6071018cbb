"""What a configuration that was read again changes, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from llamactl_supervisor import events as ev
from llamactl_supervisor.config import Config, Directories, Settings
from llamactl_supervisor.models import (
    EngineConfig,
    EngineState,
    FieldChange,
    Intent,
    Override,
    ReloadResult,
    UpRequest,
)
from llamactl_supervisor.reload import unapplied
from machine import AT, EMPTY, FACTS, PROBLEM, RECORD, play, process, receipt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llamactl_supervisor.snapshot import Snapshot

ENGINE = EngineConfig(model="/m.gguf", engine_path="/e", n_ctx=16384, n_seq=2, port=8080)
OVERRIDE = Override(
    n_ctx=65536, n_seq=8, kv_unified=None, by="me", at=datetime(2026, 1, 1, tzinfo=UTC)
)


def config(**engine: Any) -> Config:
    return Config(engine=ENGINE.model_copy(update=engine))


def request(**engine: Any) -> UpRequest:
    found = config(**engine).engine.request()
    assert found is not None
    return found


STOPPED = replace(EMPTY, settings=Settings())
READY, _ = play(STOPPED, ev.Resume(config()), ev.Spawned(1, process(1)), ev.Healthy(1, FACTS, AT))
DONE = receipt().model_copy(update={"n_weight_loads": 1})


def reload(snapshot: Snapshot, new: Config) -> tuple[Snapshot, ReloadResult | None, list[Any]]:
    """Reload, the engine agreeing to all; return the result and what the engine was asked for."""
    snapshot, effects = play(snapshot, ev.Reload("r"), ev.ConfigRead("r", new))
    sent = [effect.change for effect in effects if isinstance(effect, ev.SendReconfigure)]
    if sent:
        assert snapshot.state is EngineState.RECONFIGURING
        done = ev.Reconfigured(1, sent[0], DONE, "me", OVERRIDE.at)
        snapshot, more = play(snapshot, done)
        effects += more
    results = [effect.result for effect in effects if isinstance(effect, ev.Finish)]
    result = results[0] if results else None
    assert result is None or isinstance(result, ReloadResult)
    asked = [change.model_dump(exclude_none=True, exclude={"dry_run"}) for change in sent]
    return snapshot, result, asked


def names(changes: Iterable[FieldChange]) -> list[str]:
    return [change.field for change in changes]


def test_a_configured_model_is_loaded_when_the_daemon_starts() -> None:
    for saved in (STOPPED, replace(STOPPED, intent=Intent.DOWN, desired=request(port=1))):
        snapshot, effects = play(saved, ev.Resume(config()))
        assert effects == (ev.Spawn(1, effects[0].instance_id, request(), None),)  # type: ignore[union-attr]
        assert (snapshot.cause, snapshot.intent) == (ev.LoadCause.CONFIG, Intent.UP)


def test_without_a_model_or_when_told_not_to_the_saved_intent_counts() -> None:
    up = replace(STOPPED, intent=Intent.UP, desired=request())
    snapshot, effects = play(up, ev.Resume(config(model=None)))
    assert [type(effect) for effect in effects] == [ev.Spawn]
    assert snapshot.cause is ev.LoadCause.RESUME
    assert play(replace(up, intent=Intent.DOWN), ev.Resume(config(model=None)))[1] == ()
    snapshot, effects = play(up, ev.Resume(config(), load=False))
    assert (effects, snapshot.state) == ((), EngineState.STOPPED)
    assert snapshot.config == config()


def test_the_llama_server_of_before_serves_where_none_is_configured() -> None:
    old = replace(STOPPED, desired=request(engine_path="/old"))
    _, effects = play(old, ev.Resume(config(engine_path=None)))
    assert isinstance(effects[0], ev.Spawn)
    assert effects[0].request == request(engine_path="/old")


def test_an_unchanged_configuration_touches_nothing() -> None:
    snapshot, result, asked = reload(READY, config())
    assert (snapshot, asked) == (READY, [])
    assert result == ReloadResult(unchanged=True)


def test_live_fields_become_one_reconfigure_of_these_fields_alone() -> None:
    snapshot, result, asked = reload(READY, config(n_ctx=131072, kv_unified=True))
    assert asked == [{"n_ctx": 131072, "kv_unified": True}]
    assert result is not None
    assert names(result.applied) == ["engine.n_ctx", "engine.kv_unified"]
    assert result.applied[0] == FieldChange(field="engine.n_ctx", before=16384, after=131072)
    assert (result.needs_restart, result.receipt, result.unchanged) == ((), DONE, False)
    wanted = request(n_ctx=131072, kv_unified=True)
    assert (snapshot.desired, snapshot.running, snapshot.override) == (wanted, wanted, None)
    assert unapplied(snapshot) == ()
    assert reload(snapshot, config(n_ctx=131072, kv_unified=True))[1:] == (
        ReloadResult(unchanged=True),
        [],
    )


def test_a_refused_change_leaves_all_as_it_was_and_the_next_reload_tries_again() -> None:
    new = config(n_ctx=131072, port=9090)
    asked, _ = play(READY, ev.ConfigRead("r", new))
    refused, effects = play(asked, ev.ReconfigureFailed(1, PROBLEM))
    assert effects == (ev.Fail("r", PROBLEM),)
    assert refused == READY
    assert reload(refused, new)[2] == [{"n_ctx": 131072}]


def test_an_engine_that_dies_of_the_change_comes_back_with_the_old_configuration() -> None:
    asked, _ = play(READY, ev.ConfigRead("r", config(n_ctx=131072)))
    crashed, effects = play(asked, ev.Exited(1, RECORD, 0.5))
    assert [e.operation for e in effects if isinstance(e, ev.Fail)] == ["r"]
    assert (crashed.desired, crashed.baseline) == (request(), config().engine)
    assert crashed.deadline is not None
    _, effects = play(crashed, ev.Tick(), now=crashed.deadline)
    assert isinstance(effects[0], ev.Spawn)
    assert effects[0].request == request()


def test_cold_fields_wait_for_the_next_start_and_are_told_until_then() -> None:
    new = config(port=9090, extra_args=("--jinja",))
    snapshot, result, asked = reload(READY, new)
    assert asked == []
    assert result is not None
    assert (result.applied, result.unchanged) == ((), False)
    assert names(result.needs_restart) == ["engine.port", "engine.extra_args"]
    assert (snapshot.running, snapshot.desired) == (request(), new.engine.request())
    assert names(unapplied(snapshot)) == ["engine.port", "engine.extra_args"]
    _, again, _ = reload(snapshot, new)
    assert again == ReloadResult(needs_restart=result.needs_restart, unchanged=True)

    # `up` is told about what runs, not about what will.
    same, other = play(snapshot, ev.Up("a", request()), ev.Up("b", new.engine.request()))[1]  # type: ignore[arg-type]
    assert isinstance(same, ev.Finish)
    assert isinstance(other, ev.Reject)
    assert "port is 8080, asked for 9090" in other.problem.message

    back, _ = play(snapshot, ev.Restart("x"), ev.Exited(1, RECORD, 0.5))
    assert back.running == new.engine.request()


def test_live_and_cold_in_one_file() -> None:
    snapshot, result, asked = reload(READY, config(n_seq=4, port=9090))
    assert asked == [{"n_seq": 4, "n_ctx": 16384}], "the total goes along"
    assert result is not None
    assert names(result.applied) == ["engine.n_seq"]
    assert names(result.needs_restart) == ["engine.port"]
    assert (snapshot.desired, snapshot.running) == (request(n_seq=4, port=9090), request(n_seq=4))


def test_what_was_set_live_stays_unless_that_very_field_changes_in_the_file() -> None:
    live = replace(READY, override=OVERRIDE)
    snapshot, _, asked = reload(live, config(port=9090))
    assert (asked, snapshot.override) == ([], OVERRIDE)
    snapshot, _, asked = reload(live, config(n_ctx=32768))
    assert asked == [{"n_ctx": 32768}]
    assert snapshot.override == OVERRIDE.model_copy(update={"n_ctx": 32768})
    snapshot, result, asked = reload(live, config(n_ctx=OVERRIDE.n_ctx))
    assert asked == [], "the engine has it already"
    assert result is not None
    assert names(result.applied) == ["engine.n_ctx"]


def test_what_up_was_given_by_flags_stays_as_well() -> None:
    flagged = replace(
        READY, desired=request(n_ctx=4096, port=1), running=request(n_ctx=4096, port=1)
    )
    assert names(unapplied(flagged)) == ["engine.n_ctx", "engine.port"]
    snapshot, _, asked = reload(flagged, config(n_seq=3))
    assert asked == [{"n_seq": 3, "n_ctx": 4096}]
    assert snapshot.desired == request(n_ctx=4096, port=1, n_seq=3)


def test_a_pool_left_to_the_engine_needs_a_restart() -> None:
    """No reconfigure can say "as you would"."""
    ready, _, _ = reload(READY, config(kv_unified=True))
    snapshot, result, asked = reload(ready, config())
    assert asked == []
    assert result is not None
    assert names(result.needs_restart) == ["engine.kv_unified"]
    assert snapshot.desired == request()
    assert reload(snapshot, config())[1] == ReloadResult(
        needs_restart=result.needs_restart, unchanged=True
    )


def test_a_model_left_out_asks_for_no_other() -> None:
    snapshot, result, _ = reload(READY, config(model=None, engine_path=None))
    assert result == ReloadResult(unchanged=True)
    assert snapshot.desired == request()


@pytest.mark.parametrize("desired", [None, request()])
def test_without_an_engine_the_next_start_takes_it(desired: UpRequest | None) -> None:
    idle = replace(STOPPED, desired=desired, config=config(), baseline=config().engine)
    snapshot, result, asked = reload(idle, config(n_ctx=32768, port=9090))
    assert asked == []
    assert result is not None
    assert names(result.applied) == ["engine.n_ctx", "engine.port"]
    assert result.needs_restart == ()
    assert snapshot.desired == request(n_ctx=32768, port=9090)


@pytest.mark.parametrize("command", [ev.Restart("x"), ev.Stop("x"), ev.Reconfigure("x", None)])  # type: ignore[arg-type]
def test_in_the_middle_of_something_nothing_is_changed(command: ev.Command) -> None:
    busy, _ = play(READY, command)
    after, effects = play(busy, ev.ConfigRead("r", config(n_ctx=32768)))
    assert after == busy
    assert isinstance(effects[0], ev.Fail)
    assert effects[0].problem.code == "operation_in_progress"


def test_a_broken_file_changes_nothing() -> None:
    assert play(READY, ev.ConfigBroken("r", PROBLEM)) == (READY, (ev.Fail("r", PROBLEM),))


def test_settings_hold_at_once_but_for_what_is_read_once() -> None:
    new = config().model_copy(
        update={
            "daemon": Settings(stop_term_s=1, close_s=9),
            "paths": Directories(state_dir="/elsewhere"),
        }
    )
    snapshot, effects = play(READY, ev.ConfigRead("r", new))
    use, finish = effects
    assert isinstance(use, ev.UseSettings)
    assert (use.settings.stop_term_s, use.settings.close_s) == (1, Settings().close_s)
    assert snapshot.settings == use.settings
    assert isinstance(finish, ev.Finish)
    assert isinstance(finish.result, ReloadResult)
    assert names(finish.result.applied) == ["daemon.stop_term_s"]
    assert names(finish.result.needs_restart) == ["daemon.close_s", "paths.state_dir"]
    _, result, _ = reload(snapshot, new)
    assert result is not None
    assert names(result.needs_restart) == ["daemon.close_s", "paths.state_dir"], "told again"


def test_an_engine_that_still_runs_is_left_as_it_is_and_reload_changes_it() -> None:
    saved = replace(
        STOPPED, intent=Intent.UP, generation=1, desired=request(), running=request(),
        baseline=config().engine, loads_recorded=1,
    )  # fmt: skip
    new = config(n_ctx=32768, port=9090)
    adopted, effects = play(saved, ev.Found(process(1), new), ev.Healthy(1, FACTS, AT))
    assert [type(effect) for effect in effects] == [ev.Watch, ev.CarryOff], "nothing is asked of it"
    assert adopted.running == request()
    assert adopted.desired == request(port=9090), "the next start is on the new port"
    assert names(unapplied(adopted)) == ["engine.port", "engine.n_ctx"]
    snapshot, result, asked = reload(adopted, new)
    assert asked == [{"n_ctx": 32768}]
    assert result is not None
    assert names(result.needs_restart) == ["engine.port"]
    assert names(unapplied(snapshot)) == ["engine.port"]


def test_an_engine_of_a_time_before_there_was_a_file_is_compared_as_it_was_asked_for() -> None:
    saved = replace(STOPPED, intent=Intent.UP, generation=1, desired=request(n_ctx=4096))
    adopted, _ = play(saved, ev.Found(process(1), config()), ev.Healthy(1, FACTS, AT))
    assert reload(adopted, config())[2] == [{"n_ctx": 16384}]


def test_an_override_outlives_the_daemon_unless_its_field_was_changed_meanwhile() -> None:
    saved = replace(STOPPED, desired=request(), override=OVERRIDE, baseline=config().engine)
    assert play(saved, ev.Resume(config()))[0].override == OVERRIDE
    changed, _ = play(saved, ev.Resume(config(n_seq=3)))
    assert changed.override == OVERRIDE.model_copy(update={"n_seq": 3})
    assert play(replace(saved, baseline=None), ev.Resume(config()))[0].override is None
