"""What a configuration that was read again changes: live, at the next start, or not yet.

Only what changed in the configuration is touched, field by field: what `up` was given by flags and
what was set live stays. `baseline` is the [engine] that was last brought into force; the next
reload is compared with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamactl_supervisor import events as ev
from llamactl_supervisor.config import Config
from llamactl_supervisor.errors import Code
from llamactl_supervisor.launch import live_spec
from llamactl_supervisor.models import (
    EngineConfig,
    EngineState,
    FieldChange,
    Override,
    Problem,
    Receipt,
    ReconfigureRequest,
    ReloadResult,
    UpRequest,
)
from llamactl_supervisor.snapshot import IDLE, Reloading, Snapshot, Step, spawn

LIVE_FIELDS = frozenset(ReconfigureRequest.model_fields) - {"dry_run"}
"""Fields of [engine] that change on the loaded weights; the rest needs another process."""
WHAT_RUNS = frozenset({"model", "engine_path"})
"""Fields that are asked for by nobody where the configuration leaves them out."""
AT_DAEMON_START = frozenset({"close_s"})
"""Fields of [daemon] that are read once."""


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


def begin(snapshot: Snapshot, config: Config, *, load: bool, now: float) -> Step:
    """The daemon is new and no engine runs: take the configuration, and start what it names.

    A geometry that was set live under the same configuration is kept.
    """
    baseline, fallback = snapshot.baseline, snapshot.desired
    changed = {} if baseline is None else _changed(baseline, config.engine)
    override = None if baseline is None else _without(snapshot.override, changed)
    known = replace(snapshot, config=config, baseline=config.engine)
    request = config.engine.request(None if fallback is None else fallback.engine_path)
    if load and request is not None:
        wanted = replace(known, desired=request, override=override)
        return spawn(wanted, ev.LoadCause.CONFIG, now)
    desired = _merged(snapshot.desired, changed)
    return replace(known, desired=desired, override=_without(snapshot.override, changed)), ()


def compare_found(snapshot: Snapshot, config: Config) -> Snapshot:
    """The daemon is new and its predecessor's engine runs: it is left exactly as it is.

    What needs a restart is what the next start will do; what can change live waits for a reload.
    """
    desired = snapshot.desired
    if desired is None:
        return replace(snapshot, config=config)
    baseline = snapshot.baseline or EngineConfig.of(desired)
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
    """Return what the running engine has otherwise than the next start or the configuration."""
    if snapshot.running is None or snapshot.process is None:
        return ()
    live = _fields(snapshot.running, snapshot.override)
    found = {change.field: change for change in _differing(snapshot.running, snapshot.desired)}
    engine = None if snapshot.config is None else snapshot.config.engine
    for name in () if engine is None else sorted(engine.model_fields_set):
        wanted = getattr(engine, name)
        if live[name] != wanted and not (wanted is None and name in WHAT_RUNS):
            change = FieldChange(field=f"engine.{name}", before=live[name], after=wanted)
            found[change.field] = change
    return tuple(found.values())


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
        late = AT_DAEMON_START if section == "daemon" else frozenset(type(new).model_fields)
        found = [
            name for name in type(new).model_fields if getattr(old, name) != getattr(new, name)
        ]
        for name in found:
            key = f"{section}.{name}"
            change = FieldChange(field=key, before=getattr(old, name), after=getattr(new, name))
            changed.append(change)
            if name in late:
                needs_restart.append(change)
        # What is not in force yet is told again by the next reload.
        stays = {name: getattr(old, name) for name in found if name in late}
        kept[section] = new.model_copy(update=stays)
    desired = _merged(snapshot.desired, engine) or config.engine.request()
    override = _without(snapshot.override, engine)
    live: dict[str, Any] = {}
    if snapshot.running is not None and snapshot.state is EngineState.READY:
        runs = _fields(snapshot.running, snapshot.override)
        asked = {name: value for name, value in engine.items() if name in LIVE_FIELDS}
        live = {n: value for n, value in asked.items() if value is not None and value != runs[n]}
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
    return UpRequest(
        spec=request.spec.model_copy(update=spec),
        engine_path=fields.get("engine_path", request.engine_path),
    )


def _without(override: Override | None, fields: dict[str, Any]) -> Override | None:
    """Return the override with the fields that the configuration has changed since."""
    geometry = {name: value for name, value in fields.items() if name in LIVE_FIELDS}
    return None if override is None else override.model_copy(update=geometry)


def _with_live(running: UpRequest | None, desired: UpRequest | None) -> UpRequest | None:
    """Return what runs, once the live fields of what is wanted are in force.

    None is "as the engine does", which can be said on its command line only.
    """
    if running is None or desired is None:
        return running
    wanted = {name: getattr(desired.spec, name) for name in LIVE_FIELDS}
    return _merged(running, {name: value for name, value in wanted.items() if value is not None})


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
