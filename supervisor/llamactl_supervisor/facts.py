"""What the engine says of itself, taken into the snapshot, and what that adds to the ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor.launch import live_spec
from llamactl_supervisor.models import EngineState, Override

if TYPE_CHECKING:
    from datetime import datetime

    from llamactl_supervisor.events import EngineFacts
    from llamactl_supervisor.models import ExitRecord, Problem, Receipt
    from llamactl_supervisor.snapshot import Snapshot, Step

SOMEBODY = "engine socket"
"""Who made a change that the daemon only found made."""
NEW_LOADS_MAX = 100
"""Most ledger lines for what an engine says at once; it loads once between two questions."""


def observed(snapshot: Snapshot, event: ev.Observed, now: float) -> Step:
    """Take in what an engine says that serves.

    While a reconfigure is under way its receipt tells of the geometry, and what the engine was
    asked before that came is old.
    """
    if event.asked_at < snapshot.facts_at:
        return snapshot, ()
    if snapshot.trial_ends is not None and now >= snapshot.trial_ends:
        snapshot = replace(snapshot, trial_ends=None)
    facts = event.facts
    if snapshot.state is EngineState.RECONFIGURING:
        known = snapshot.facts
        facts = replace(
            facts,
            geometry=known.geometry,
            n_weight_loads=known.n_weight_loads,  # it may be the change that woke the engine
            last_reconfigure=known.last_reconfigure,
        )
    return took(snapshot, facts, event.at, now, wake_s=event.wake_s)


def took(
    snapshot: Snapshot,
    facts: EngineFacts,
    at: datetime,
    now: float,
    *,
    load_s: float | None = None,
    wake_s: float | None = None,
) -> Step:
    """Take `facts` for what is so; changes and loads among them that nobody told of are recorded.

    `load_s` is what the first load of this process took, `wake_s` what one after a sleep took.
    """
    receipt = facts.last_reconfigure
    changes: tuple[ev.Effect, ...] = ()
    if receipt is not None and not _same_change(receipt, snapshot.facts.last_reconfigure):
        by = snapshot.change_by or SOMEBODY
        snapshot = on_trial(snapshot, _found(snapshot, receipt, by, at), now)
        snapshot = replace(snapshot, change_by=None)
        if not _woke(snapshot, receipt):
            changes = (ev.RecordAvoided(receipt, by),)
    snapshot, loads = _loads(replace(snapshot, facts=facts), load_s=load_s, wake_s=wake_s)
    return snapshot, (*changes, *loads)


def answered(snapshot: Snapshot, receipt: Receipt, by: str, now: float) -> Step:
    """Take in the receipt of a change that `by` has asked for.

    One that woke the engine has loaded the weights, for `by`, and avoided no load; so has a dry run
    or a change to what is there already.
    """
    known, applied, woke = snapshot.facts, receipt.outcome == "applied", _woke(snapshot, receipt)
    facts = replace(
        known,
        geometry=receipt.geometry if applied else known.geometry,
        n_weight_loads=receipt.n_weight_loads or known.n_weight_loads,
        last_reconfigure=receipt if applied else known.last_reconfigure,
    )
    snapshot, loads = _loads(replace(snapshot, facts=facts, facts_at=now), by=by)
    return snapshot, ((ev.RecordAvoided(receipt, by),) if applied and not woke else ()) + loads


def _woke(snapshot: Snapshot, receipt: Receipt) -> bool:
    """Say whether this change had the engine load its weights."""
    return (receipt.n_weight_loads or 0) > max(1, snapshot.loads_recorded)


def _found(snapshot: Snapshot, receipt: Receipt, by: str, at: datetime) -> Override:
    """Return the geometry that a change has set which we did not make."""
    before, after, desired = receipt.previous, receipt.geometry, snapshot.desired
    unified = after.kv_unified
    if unified == before.kv_unified and desired is not None:  # nobody set it
        unified = live_spec(desired.spec, snapshot.override).kv_unified
    return Override(n_ctx=after.n_ctx, n_seq=after.n_seq, kv_unified=unified, by=by, at=at)


def on_trial(snapshot: Snapshot, override: Override, now: float) -> Snapshot:
    """Hold to a geometry that was set live, and remember the one that had proven itself."""
    proven = snapshot.trial_ends is None or now >= snapshot.trial_ends
    return replace(
        snapshot,
        override=override,
        last_good=snapshot.override if proven else snapshot.last_good,
        trial_ends=now + snapshot.settings.override_trial_s,
        dropped=None,
    )


def fall_back(
    snapshot: Snapshot, problem: Problem, now: float, *, loading: bool
) -> tuple[Snapshot, Problem]:
    """Go back to the last geometry known good when one that was set live has come to a crash.

    While it serves that counts as long as the geometry is on trial; while it is `loading` always,
    for no load may ever have had this geometry.
    """
    override, ends, desired = snapshot.override, snapshot.trial_ends, snapshot.desired
    on_trial = loading or (ends is not None and now < ends)
    if override is None or desired is None or not on_trial:
        return snapshot, problem
    before, dropped = live_spec(desired.spec, snapshot.last_good), live_spec(desired.spec, override)
    snapshot = replace(snapshot, override=snapshot.last_good, last_good=None, trial_ends=None)
    if before == dropped:
        return snapshot, problem
    when = "in a load after" if loading else "soon after"
    said = problem.model_copy(
        update={
            "message": f"{problem.message}, {when} its geometry was changed to n_ctx "
            f"{override.n_ctx}, n_seq {override.n_seq} (by {override.by}): it goes back to "
            f"n_ctx {before.n_ctx}, n_seq {before.n_seq}",
            "details": problem.details | {"dropped_override": override.model_dump(mode="json")},
        }
    )
    return replace(snapshot, dropped=override, dropped_for=snapshot.generation + 1), said


def load(
    snapshot: Snapshot, cause: ev.LoadCause, load_s: float | None, *, loaded: bool
) -> ev.RecordLoad:
    """Return the record of one load of this engine: of one that serves, as it has rounded it."""
    assert snapshot.running is not None
    spec, known = live_spec(snapshot.running.spec, snapshot.override), snapshot.facts.geometry
    if loaded and known is not None:
        spec = spec.model_copy(update={"n_ctx": known.n_ctx})
    first = snapshot.generation == snapshot.dropped_for and cause is not ev.LoadCause.WAKE
    dropped = snapshot.dropped if first else None
    applying = snapshot.applying
    reasons = () if applying is None else tuple(each.field for each in applying.plan.reasons)
    return ev.RecordLoad(
        *(snapshot.generation, cause, load_s, loaded, spec, dropped),
        reasons=reasons,
        port_closed_s=snapshot.port_closed_s,
    )


def crash(snapshot: Snapshot, record: ExitRecord, problem: Problem) -> ev.RecordCrash:
    """Return the record of an end that nobody has asked for."""
    assert snapshot.process is not None
    assert snapshot.running is not None
    return ev.RecordCrash(
        generation=snapshot.generation,
        process=snapshot.process,
        cause=snapshot.cause,
        facts=snapshot.facts,
        override=snapshot.override,
        problem=problem,
        record=record,
        api_key_file=snapshot.running.spec.api_key_file,
    )


def _loads(
    snapshot: Snapshot,
    *,
    load_s: float | None = None,
    wake_s: float | None = None,
    by: str | None = None,
) -> tuple[Snapshot, tuple[ev.RecordLoad, ...]]:
    """Record what an engine that serves has loaded by now: once at least, and once a wake.

    `by`: who woke it, where that is known.
    """
    known, said = snapshot.loads_recorded, max(1, snapshot.facts.n_weight_loads or 1)
    new = range(known, min(said, known + NEW_LOADS_MAX))
    records = tuple(
        load(snapshot, snapshot.cause, load_s, loaded=True)
        if number == 0
        else replace(
            load(snapshot, ev.LoadCause.WAKE, wake_s if len(new) == 1 else None, loaded=True), by=by
        )
        for number in new
    )
    return replace(snapshot, loads_recorded=max(known, said)), records


def _same_change(one: Receipt, other: Receipt | None) -> bool:
    """Say whether both tell of one change: the engine's own account of it grows afterwards."""
    return other is not None and (one.previous, one.geometry, one.pause_ms, one.phases_ms) == (
        *(other.previous, other.geometry, other.pause_ms, other.phases_ms),
    )
