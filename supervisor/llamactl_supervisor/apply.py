"""What an apply does to the engine's state: what it comes to, how it begins and ends."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from llamactl_supervisor import events as ev
from llamactl_supervisor import facts
from llamactl_supervisor.errors import Code
from llamactl_supervisor.fields import AUTO
from llamactl_supervisor.launch import live_spec
from llamactl_supervisor.models import (
    After,
    ApplyPlan,
    ApplyResult,
    EngineState,
    Intent,
    LifecycleResult,
    LostApply,
    Override,
    PlanField,
    Problem,
    ReconfigureRequest,
    UpRequest,
)
from llamactl_supervisor.plan import NoChange, Reconfigure, plan
from llamactl_supervisor.snapshot import (
    IDLE,
    Applying,
    Snapshot,
    Step,
    Unended,
    apply_cause,
    spawn,
    wind_down,
)

if TYPE_CHECKING:
    from datetime import datetime

    from llamactl_supervisor.models import OperationResult, Receipt
    from llamactl_supervisor.spec import EngineSpec


def comes_to(snapshot: Snapshot, spec: EngineSpec) -> ApplyPlan:
    """Return what takes the engine to `spec`, as far as that can be told without asking anybody."""
    if snapshot.state in IDLE:
        wanted = snapshot.intent is Intent.UP or snapshot.owner is not None
        return ApplyPlan(action="start" if wanted else "store")
    running = _running_spec(snapshot)
    if running is None:
        unknown = PlanField(field="engine", kind="build", before=None, after=spec.build)
        return ApplyPlan(action="relaunch", reasons=(unknown,))
    verdict = plan(running, spec)
    if isinstance(verdict, NoChange):
        return ApplyPlan(action="none")
    if isinstance(verdict, Reconfigure):
        return ApplyPlan(action="reconfigure", changes=verdict.changes)
    return ApplyPlan(action="relaunch", reasons=verdict.reasons, changes=verdict.changes)


def change(command: ev.Apply, found: ApplyPlan, *, dry_run: bool = False) -> ReconfigureRequest:
    """Return what is asked of the engine for the changes of a plan.

    The total goes along whatever changes: what the engine has was rounded for other slots.
    """
    total = command.spec.n_ctx
    asked = {} if total == AUTO else {"n_ctx": total}
    asked |= {each.field: each.after for each in found.changes}
    return ReconfigureRequest.model_validate(asked | {"dry_run": dry_run})


def begin(
    snapshot: Snapshot,
    command: ev.Apply,
    found: ApplyPlan,
    now: float,
    older: tuple[ev.Apply, ...] = (),
) -> Step:
    """Carry out an apply, and with it the `older` ones that it is on top of."""
    before = snapshot if found.action == "relaunch" else None
    applying = Applying(command, found, before, older)
    begun = replace(snapshot, applying=applying)
    match found.action:
        case "none" | "store":
            result = ApplyResult(applied=found.action == "store", plan=found)
            return _in_force(begun, now=now), (ev.Finish(command.operation, result),)
        case "reconfigure":
            assert snapshot.process is not None
            send = ev.SendReconfigure(
                snapshot.generation, snapshot.process, command.operation, change(command, found)
            )
            state = EngineState.RECONFIGURING
            return replace(begun, state=state, waiting=(command.operation,)), (send,)
    waiting = (*snapshot.waiting, command.operation)
    wanted = replace(_in_force(begun, now=now), waiting=waiting, crashes=0)
    if found.action == "relaunch":
        return wind_down(wanted, After.START, now, may_lose=command.accept_loss)
    return spawn(wanted, apply_cause(wanted), now)


def changes(snapshot: Snapshot) -> bool:
    """Say whether it is an apply that the engine is changed for."""
    return snapshot.applying is not None and snapshot.applying.plan.action == "reconfigure"


def reconfigured(snapshot: Snapshot, receipt: Receipt, at: datetime, now: float) -> Step:
    """The engine has changed: what was applied is in force, and its geometry on trial."""
    applying = snapshot.applying
    assert applying is not None
    after = _in_force(snapshot, now=now, at=at)
    result = ApplyResult(applied=True, plan=applying.plan, receipt=receipt)
    return after, (ev.Finish(applying.command.operation, result),)


def result(snapshot: Snapshot, operation: str, lifecycle: LifecycleResult) -> OperationResult:
    """Return what an operation that waited for a start came to."""
    applying = snapshot.applying
    if applying is None or applying.command.operation != operation:
        return lifecycle
    return ApplyResult(applied=True, plan=applying.plan, lifecycle=lifecycle)


def tell_older(
    before: Snapshot, after: Snapshot, effects: tuple[ev.Effect, ...]
) -> tuple[ev.Effect, ...]:
    """Return the effects of a step, and of each apply that ends in it the ends of its `older`."""
    applying = [each for each in (before.applying, after.applying) if each is not None]
    older = {each.command.operation: each.older for each in applying}
    told: list[ev.Effect] = []
    for effect in effects:
        if isinstance(effect, ev.Finish | ev.Fail):
            taken = older.get(effect.operation, ())
            told += [_ends_with(effect, each.operation) for each in taken]
        told.append(effect)
    return tuple(told)


def _ends_with(end: ev.Finish | ev.Fail, operation: str) -> ev.Finish | ev.Fail:
    if isinstance(end, ev.Fail):
        said = f"carried out with a newer apply, which failed: {end.problem.message}"
        details = end.problem.details | {"with_operation": end.operation}
        update = {"message": said, "details": details}
        return ev.Fail(operation, end.problem.model_copy(update=update))
    assert isinstance(end.result, ApplyResult)
    taken = end.result.model_copy(update={"with_operation": end.operation})
    return ev.Finish(operation, taken)


def roll_back(snapshot: Snapshot, problem: Problem, now: float) -> Step | None:
    """Load the engine again that a relaunch has ended for one that does not load; None: none."""
    applying = snapshot.applying
    if applying is None or applying.before is None:
        return None
    before, command = applying.before, applying.command
    said = Problem(
        code=Code.APPLY_FAILED,
        message=f"{problem.message}; the engine that ran before is loaded again",
        hint=problem.hint,
        details=problem.details | {"reason": problem.code},
    )
    left = tuple(name for name in snapshot.waiting if name != command.operation)
    back = replace(_wanted_before(snapshot, before), applying=None, process=None, waiting=left)
    again, effects = spawn(back, ev.LoadCause.RESTART, now)
    return again, (ev.Fail(command.operation, said), *effects)


def overtaken(snapshot: Snapshot) -> tuple[Snapshot, tuple[str, ...]]:
    """A stop overtakes the start that is carried out: it ends with the stop, and is not wanted.

    Returned is who is told of it then. The run of an engine is not: its own end is told to it.
    """
    applying, owner = snapshot.applying, snapshot.owner
    if applying is None or snapshot.state in IDLE or snapshot.state is EngineState.RECONFIGURING:
        return snapshot, ()
    operation = applying.command.operation
    if owner is not None and owner.id == operation:
        return snapshot, ()
    if applying.before is not None:
        snapshot = _wanted_before(snapshot, applying.before)
    return snapshot, (operation,)


def stopped(snapshot: Snapshot, operation: str) -> ev.Fail | None:
    """Return the end of an apply that a stop has overtaken; None: it is another operation."""
    applying = snapshot.applying
    if applying is None or applying.command.operation != operation:
        return None
    wanted = "wanted before" if applying.plan.action == "relaunch" else "applied"
    problem = Problem(
        code=Code.SUPERSEDED,
        message="the engine was stopped before this came to its end, and no engine runs; "
        f"the next start is what was {wanted}",
    )
    return ev.Fail(operation, problem)


def settle(snapshot: Snapshot, effects: tuple[ev.Effect, ...]) -> Snapshot:
    """Forget an apply that has ended; a relaunch that came to nothing was never asked for."""
    applying = snapshot.applying
    under_way = (*snapshot.waiting, *snapshot.changing)
    if applying is None or applying.command.operation in under_way:
        return snapshot
    done = any(
        isinstance(effect, ev.Finish) and effect.operation == applying.command.operation
        for effect in effects
    )
    if not done and applying.before is not None:
        snapshot = _wanted_before(snapshot, applying.before)
    return replace(snapshot, applying=None)


def undone(before: Snapshot, effects: tuple[ev.Effect, ...]) -> ev.Apply | None:
    """Return the apply that has failed in this step; what is loaded then is loaded for it."""
    applying = before.applying
    if applying is None:
        return None
    command = applying.command
    failed = [each.operation for each in effects if isinstance(each, ev.Fail)]
    return command if applying.before is not None and command.operation in failed else None


def unended(snapshot: Snapshot) -> tuple[Unended, ...]:
    """Return the applies whose end somebody has yet to be told. A run looks after its own."""
    pending, applying, owner = snapshot.pending, snapshot.applying, snapshot.owner
    waiting = () if pending is None else pending.waiting
    found = (*snapshot.lost, *map(Unended, waiting))
    if applying is not None:
        command, is_sent = applying.command, changes(snapshot)
        taken = (replace(e, request=command.request, spec=command.spec) for e in applying.older)
        found = (*found, *(Unended(each, is_sent) for each in (*taken, command)))
    return tuple(each for each in found if owner is None or each.command.operation != owner.id)


def tell_lost(snapshot: Snapshot) -> Step:
    """Say what came of those that the daemon before this one died over, as soon as that shows."""
    known = snapshot.state in {EngineState.READY, EngineState.FAILED, EngineState.STOPPED}
    if not known or not snapshot.lost:
        return snapshot, ()
    told = tuple(ev.RecordLost(_came_to(snapshot, each)) for each in snapshot.lost)
    return replace(snapshot, lost=()), told


def _came_to(snapshot: Snapshot, lost: Unended) -> LostApply:
    command, found = lost.command, comes_to(snapshot, lost.command.spec)
    outcome: Literal["in_force", "open", "wanted", "lost"] = "lost"
    if found.action == "none":
        outcome = "in_force"
    elif lost.is_sent and snapshot.state is EngineState.READY:
        outcome = "open"
    elif snapshot.desired == command.request:
        outcome = "wanted"
    return LostApply(
        operation=command.operation,
        by=command.by,
        outcome=outcome,
        differs=(*found.reasons, *found.changes),
    )


def at_rest(snapshot: Snapshot) -> bool:
    """Say whether nothing is under way that an apply has to wait for."""
    return snapshot.state in IDLE or snapshot.state is EngineState.READY


def _wanted_before(snapshot: Snapshot, before: Snapshot) -> Snapshot:
    """Return the snapshot with what was wanted then."""
    return replace(
        snapshot,
        desired=before.desired,
        override=before.override,
        last_good=before.last_good,
        config=before.config,
        baseline=before.baseline,
    )


def _running_spec(snapshot: Snapshot) -> EngineSpec | None:
    """Return what the engine was asked to be, with the geometry that it was asked for last."""
    spec, running = snapshot.running_spec, snapshot.running
    if spec is None or running is None:
        return None
    live = live_spec(running.spec, snapshot.override)
    n_ctx = spec.n_ctx if live.n_ctx == AUTO else live.n_ctx
    return spec.with_geometry(n_ctx, live.n_seq, live.kv_unified)


def _in_force(snapshot: Snapshot, *, now: float, at: datetime | None = None) -> Snapshot:
    """Return the snapshot with what is applied wanted from now on.

    `at`: its geometry was set live then. It is on trial like any other that was.
    """
    assert snapshot.applying is not None
    command, before = snapshot.applying.command, snapshot.desired
    request = command.request
    after = replace(snapshot, desired=request)
    if command.config is not None:
        engine = command.config.engine
        known = (snapshot.config or command.config).model_copy(update={"engine": engine})
        after = replace(after, config=known, baseline=engine)
    if snapshot.applying.plan.action == "none":
        return replace(after, running=request)
    after = replace(after, override=None, last_good=None, trial_ends=None, dropped=None)
    if at is None or before is None or snapshot.running_spec is None:
        return after
    spec = command.spec
    running_spec = snapshot.running_spec.with_geometry(spec.n_ctx, spec.n_seq, spec.kv_unified)
    unified = True if spec.kv_unified else None  # separate is what it is unasked: nobody set it
    override = _override(request, command.by, at, kv_unified=unified)
    tried = facts.on_trial(snapshot, override, now)
    good = tried.last_good or _override(before, command.by, at)
    return replace(
        after,
        running=request,
        running_spec=running_spec,
        override=override,
        trial_ends=tried.trial_ends,
        last_good=good,
    )


def _override(
    request: UpRequest, by: str, at: datetime, kv_unified: bool | None = None
) -> Override:
    spec = request.spec
    unified = spec.kv_unified if kv_unified is None else kv_unified
    return Override(n_ctx=spec.n_ctx, n_seq=spec.n_seq, kv_unified=unified, by=by, at=at)
