"""What a configuration that was read again changes: live, at the next start, or not yet.

Only what changed in the configuration is touched, field by field: what `up` was given by flags and
what was set live stays. `baseline` is the [engine] that was last brought into force; the next
reload is compared with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llamactl_supervisor import events as ev
from llamactl_supervisor.config import LIVE_FIELDS, Config, takes
from llamactl_supervisor.errors import Code
from llamactl_supervisor.fields import AUTO
from llamactl_supervisor.launch import live_spec
from llamactl_supervisor.models import (
    ConfigValue,
    EngineConfig,
    EngineState,
    FieldChange,
    Override,
    Problem,
    Receipt,
    ReconfigureRequest,
    ReloadResult,
    Takes,
    UpRequest,
)
from llamactl_supervisor.resolve import told
from llamactl_supervisor.snapshot import IDLE, Reloading, Snapshot, Step, cause_after, spawn

if TYPE_CHECKING:
    from collections.abc import Iterator

WHAT_RUNS = frozenset({"model", "engine_path"})
"""Fields that are asked for by nobody where the configuration leaves them out."""
AT_START = (None, AUTO)
"""Values of live fields that leave the choice to an engine that starts."""


def read(snapshot: Snapshot, event: ev.ConfigRead) -> Step:
    """The configuration was read again: change what can change, and say what cannot.

    Beside another reload it waits for the end of that one, and is then read once more.
    """
    if snapshot.reloading is not None:
        return replace(snapshot, reloads=(*snapshot.reloads, event.operation)), ()
    if snapshot.state not in IDLE and snapshot.state is not EngineState.READY:
        problem = Problem(
            code=Code.OPERATION_IN_PROGRESS,
            message=f"the engine is {snapshot.state}; nothing of the configuration was changed",
            hint="reload again once the operation that runs has ended",
        )
        return snapshot, (ev.Fail(event.operation, problem),)
    reloading, live = _compare(snapshot, event)
    process = snapshot.process
    if not live or process is None:
        return commit(replace(snapshot, reloading=reloading), None)
    change = ReconfigureRequest(**live)
    send = ev.SendReconfigure(snapshot.generation, process, event.operation, change)
    state, waiting = EngineState.RECONFIGURING, (event.operation,)
    return replace(snapshot, state=state, waiting=waiting, reloading=reloading), (send,)


def commit(snapshot: Snapshot, receipt: Receipt | None) -> Step:
    """Bring the configuration into force that was compared; the engine has done its part."""
    reloading = snapshot.reloading
    assert reloading is not None
    effects: list[ev.Effect] = []
    if reloading.settings != snapshot.settings:
        effects.append(ev.UseSettings(reloading.settings))
    if reloading.override != snapshot.override:  # what the configuration says is good now
        snapshot = replace(snapshot, last_good=None)
    after = replace(
        snapshot,
        settings=reloading.settings,
        config=reloading.config,
        baseline=reloading.config.engine,
        desired=reloading.desired,
        override=reloading.override,
        running=_with_live(snapshot.running, reloading.desired),
        late=reloading.needs_restart,
        reloading=None,
    )
    pending = () if after.state in IDLE else _differing(after.running, after.desired)
    left = {change.field: change for change in (*reloading.needs_restart, *pending)}
    applied = tuple(change for change in reloading.changed if change.field not in left)
    result = ReloadResult(
        applied=applied,
        needs_restart=tuple(left.values()),
        receipt=receipt,
        unchanged=not reloading.changed,
    )
    return after, (*effects, ev.Finish(reloading.operation, result))


def begin(snapshot: Snapshot, event: ev.Resume, config: Config, now: float) -> Step:
    """The daemon is new and no engine runs: take the configuration, and start what it names.

    A geometry that was set live under the same configuration is kept.
    """
    baseline, last = snapshot.baseline, snapshot.desired
    changed = {} if baseline is None else _changed(baseline, config.engine)
    override = None if baseline is None else _without(snapshot.override, changed)
    known = replace(snapshot, config=config, baseline=config.engine)
    request = config.engine.request(snapshot.built if last is None else last.engine_path)
    if event.load and request is not None:
        wanted = replace(known, desired=request, override=override)
        if request != snapshot.desired:
            return spawn(replace(wanted, crashes=0), ev.LoadCause.CONFIG, now)
        cause = cause_after(wanted, ev.LoadCause.CONFIG, begun=event.begun)
        return spawn(wanted, cause, now)
    desired = _merged(snapshot.desired, changed)
    return replace(known, desired=desired, override=_without(snapshot.override, changed)), ()


def compare_found(snapshot: Snapshot, config: Config, *, is_followed: bool) -> Snapshot:
    """The daemon is new and its predecessor's engine runs: it is left exactly as it is.

    What needs a restart is what the next start will do; what can change live waits for a reload.
    Of a file that `is_followed` all of it waits for that.
    """
    desired = snapshot.desired
    if desired is None:
        return replace(snapshot, config=config)
    baseline = snapshot.baseline or EngineConfig.of(desired)
    if is_followed:
        return replace(snapshot, config=config, baseline=baseline)
    cold = {
        name: value
        for name, value in _changed(baseline, config.engine).items()
        if name not in LIVE_FIELDS
    }
    return replace(
        snapshot,
        config=config,
        baseline=baseline.model_copy(update=cold),
        desired=_merged(desired, cold),
    )


def unapplied(snapshot: Snapshot) -> tuple[FieldChange, ...]:
    """Return what is not in force as it is configured.

    Of an engine that runs, also what it has otherwise than the next start; of the daemon, what it
    takes at its own next start only.
    """
    if snapshot.running is None or snapshot.process is None:
        return snapshot.late
    differing = _differing(snapshot.running, snapshot.desired)
    found = (*differing, *_unlike_configured(snapshot, snapshot.running))
    return (*{change.field: change for change in found}.values(), *snapshot.late)


def _unlike_configured(snapshot: Snapshot, request: UpRequest) -> Iterator[FieldChange]:
    """Yield what [engine] says, or says no more, and `request` has otherwise."""
    engine, has = (snapshot.config or Config()).engine, _fields(request, snapshot.override)
    for name in sorted(engine.model_fields_set | engine_changes(snapshot, engine).keys()):
        wanted = getattr(engine, name)
        if has[name] != wanted and not (wanted is None and name in WHAT_RUNS):
            yield FieldChange(field=f"engine.{name}", before=has[name], after=wanted)


def is_in_force(snapshot: Snapshot, engine: EngineConfig) -> bool:
    """Say whether all that was configured with this [engine] is in force.

    Where no engine runs, what the next start is counts; an apply that is under way may still fail.
    """
    config, request = snapshot.config, snapshot.desired
    if config is None or config.engine != engine or loses_model(snapshot, engine):
        return False
    if snapshot.applying is not None or unapplied(snapshot):
        return False
    if request is None or snapshot.process is not None:
        return True
    return not any(_unlike_configured(snapshot, request))


def is_left(snapshot: Snapshot) -> bool:
    """Say whether something of [engine] was configured and never brought to the engine."""
    engine = (snapshot.config or Config()).engine
    changed = engine_changes(snapshot, engine) or loses_model(snapshot, engine)
    return bool(changed or awaits_restart(snapshot))


def awaits_restart(snapshot: Snapshot) -> bool:
    """Say whether the engine that runs is another than the next start is."""
    running = None if snapshot.process is None else snapshot.running
    return bool(_differing(running, snapshot.desired))


def loses_model(snapshot: Snapshot, engine: EngineConfig) -> bool:
    """Say whether a model was configured, and is not any more: nobody asks for that."""
    return (snapshot.baseline or EngineConfig()).model is not None and engine.model is None


def in_force(snapshot: Snapshot) -> dict[str, ConfigValue]:
    """Return every key of the configuration: what was read of it, and what is gone by."""
    config = snapshot.config or Config()
    read = {
        f"{section}.{name}": told(getattr(table, name))
        for section, table in config
        for name in type(table).model_fields
    }
    after = _asked(read, snapshot.desired, snapshot)
    running = after if snapshot.process is None else _asked(read, snapshot.running, snapshot)
    return {
        key: ConfigValue(
            read=value,
            running=running[key],
            after_restart=after[key],
            takes=takes(*key.split(".")),
        )
        for key, value in read.items()
    }


def _asked(read: dict[str, Any], request: UpRequest | None, snapshot: Snapshot) -> dict[str, Any]:
    found = {} if request is None else _fields(request, snapshot.override)
    return read | {f"engine.{name}": value for name, value in found.items()}


def wanted(snapshot: Snapshot, config: Config) -> tuple[UpRequest | None, Override | None]:
    """Return what the next start would run once `config` is in force."""
    baseline = snapshot.baseline or (snapshot.config or Config()).engine
    changed = _changed(baseline, config.engine)
    desired = _merged(snapshot.desired, changed) or config.engine.request(snapshot.built)
    return desired, _without(snapshot.override, changed)


def _compare(snapshot: Snapshot, event: ev.ConfigRead) -> tuple[Reloading, dict[str, Any]]:
    """Return what is to be in force, and which live fields the engine must be asked for."""
    config, before = event.config, snapshot.config or Config()
    baseline = snapshot.baseline or before.engine
    engine = _changed(baseline, config.engine)
    changed = [
        FieldChange(field=f"engine.{name}", before=getattr(baseline, name), after=value)
        for name, value in engine.items()
    ]
    needs_restart = []
    kept: dict[str, Any] = {}
    for section in Config.model_fields:
        if section == "engine":
            continue
        old, new = getattr(before, section), getattr(config, section)
        late = {
            name for name in type(new).model_fields if takes(section, name) is Takes.DAEMON_RESTART
        }
        found = [
            name for name in type(new).model_fields if getattr(old, name) != getattr(new, name)
        ]
        for name in found:
            key = f"{section}.{name}"
            was, becomes = told(getattr(old, name)), told(getattr(new, name))
            change = FieldChange(field=key, before=was, after=becomes)
            changed.append(change)
            if name in late:
                needs_restart.append(change)
        # What is not in force yet is told again by the next reload.
        stays = {name: getattr(old, name) for name in found if name in late}
        kept[section] = new.model_copy(update=stays)
    desired, override = wanted(snapshot, config)
    live: dict[str, Any] = {}
    run = snapshot.running is not None and snapshot.running.context is not None
    if snapshot.running is not None and snapshot.state is EngineState.READY and not run:
        runs = _fields(snapshot.running, snapshot.override)
        asked = {name: value for name, value in engine.items() if name in LIVE_FIELDS}
        live = {
            n: value for n, value in asked.items() if value not in AT_START and value != runs[n]
        }
        total = None if desired is None else live_spec(desired.spec, override).n_ctx
        if live and total not in AT_START:  # what the engine has was rounded for other slots
            live["n_ctx"] = total
    reloading = Reloading(
        operation=event.operation,
        config=config.model_copy(update=kept),
        settings=kept["daemon"],
        desired=desired,
        override=override,
        changed=tuple(changed),
        needs_restart=tuple(needs_restart),
    )
    return reloading, live


def engine_changes(snapshot: Snapshot, engine: EngineConfig) -> dict[str, Any]:
    """Return the fields that have another value than what was last brought into force."""
    before = snapshot.config or Config()
    return _changed(snapshot.baseline or before.engine, engine)


def _changed(before: EngineConfig, after: EngineConfig) -> dict[str, Any]:
    """Return the fields that have another value, with that value."""
    return {
        name: getattr(after, name)
        for name in EngineConfig.model_fields
        if getattr(before, name) != getattr(after, name)
        and not (name in WHAT_RUNS and getattr(after, name) is None)
    }


def _merged(request: UpRequest | None, fields: dict[str, Any]) -> UpRequest | None:
    if request is None or not fields:
        return request
    spec = {name: value for name, value in fields.items() if name != "engine_path"}
    path = fields.get("engine_path", request.engine_path)
    return request.model_copy(
        update={"spec": request.spec.model_copy(update=spec), "engine_path": path}
    )


def _without(override: Override | None, fields: dict[str, Any]) -> Override | None:
    """Return the override with the fields that the configuration has changed since."""
    geometry = {name: value for name, value in fields.items() if name in LIVE_FIELDS}
    return None if override is None else override.model_copy(update=geometry)


def _with_live(running: UpRequest | None, desired: UpRequest | None) -> UpRequest | None:
    """Return what runs, once the live fields of what is wanted are in force.

    One of `AT_START` can be said on a command line only.
    """
    if running is None or desired is None:
        return running
    wanted = {name: getattr(desired.spec, name) for name in LIVE_FIELDS}
    return _merged(
        running, {name: value for name, value in wanted.items() if value not in AT_START}
    )


def _differing(running: UpRequest | None, desired: UpRequest | None) -> tuple[FieldChange, ...]:
    """Return what will be otherwise at the next start."""
    if running is None or desired is None or running == desired:
        return ()
    have, want = _fields(running, None), _fields(desired, None)
    return tuple(
        FieldChange(field=f"engine.{name}", before=have[name], after=want[name])
        for name in want
        if have[name] != want[name]
    )


def _fields(request: UpRequest, override: Override | None) -> dict[str, Any]:
    spec = live_spec(request.spec, override)
    return {name: getattr(spec, name) for name in type(spec).model_fields} | {
        "engine_path": request.engine_path
    }
