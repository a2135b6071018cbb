"""What each command does in each state: accepted, finished at once, or rejected with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamactl_supervisor import applies, apply, carrying, owner
from llamactl_supervisor import events as ev
from llamactl_supervisor.errors import Code
from llamactl_supervisor.fields import written
from llamactl_supervisor.models import (
    After,
    Departure,
    EngineState,
    Intent,
    LifecycleOutcome,
    LifecycleResult,
    Problem,
)
from llamactl_supervisor.repeat import Conflict, compare
from llamactl_supervisor.snapshot import (
    IDLE,
    PAGING_MAX,
    SERVING,
    Snapshot,
    Step,
    is_restart,
    rest,
    spawn,
    stopped,
    unasked,
    wind_down,
)

if TYPE_CHECKING:
    from llamactl_supervisor.events import Command


def obey(snapshot: Snapshot, command: Command, now: float) -> Step:
    """Return the step for `command`; a rejected one leaves the snapshot as it was."""
    if (snapshot.closing or snapshot.leaving) and not isinstance(command, ev.Down):
        return _reject(snapshot, command, Code.SHUTTING_DOWN, "the daemon is shutting down")
    match command:
        case ev.Run():
            return owner.run(snapshot, command)
        case ev.Up():
            return _up(snapshot, command, now)
        case ev.Start():
            return _start_again(snapshot, command, now)
        case ev.Restart():
            return _restart(snapshot, command, now)
        case ev.Stop() | ev.Down():
            return _stop(snapshot, command, now)
        case ev.Reconfigure():
            return _reconfigure(snapshot, command)
        case ev.Apply() | ev.Reload():
            return _follow(snapshot, command)
        case ev.Page() | ev.PageFile():
            return _page(snapshot, command)


def not_serving(snapshot: Snapshot) -> Problem | None:
    """Return why nothing can be asked of the engine now, or None if it can."""
    if snapshot.state in SERVING and snapshot.process is not None:
        return None
    if snapshot.state is EngineState.STARTING:
        hint = "wait for it: `llamactl wait --ready`"
        return Problem(code=Code.OPERATION_IN_PROGRESS, message="the engine is starting", hint=hint)
    message = f"there is no running engine to ask: it is {snapshot.state}"
    return Problem(code=Code.ENGINE_STOPPED, message=message, hint="use `llamactl start`")


def _up(snapshot: Snapshot, command: ev.Up, now: float) -> Step:
    if snapshot.owner is not None:
        return snapshot, (ev.Reject(command.operation, owner.owned(snapshot.owner)),)
    if snapshot.state in IDLE:
        # A fresh `up` means what it says; one that repeats itself over a crash changes nothing.
        crashed = snapshot.state is not EngineState.STOPPED
        same = crashed and command.request == snapshot.desired and not command.exact
        override = snapshot.override if same else None
        asked = replace(snapshot, desired=command.request, override=override)
        if not same:
            asked = replace(asked, last_good=None, trial_ends=None, dropped=None)
        return _start(asked, command, ev.LoadCause.UP, now)
    if snapshot.running is not None and snapshot.state is not EngineState.STOPPING:
        verdict = compare(snapshot.running, snapshot.override, command.request, exact=command.exact)
        if isinstance(verdict, Conflict):
            differing = "; ".join(
                f"{name} is {written(running)}, asked for {written(asked)}"
                for name, (running, asked) in verdict.fields.items()
            )
            return _reject(
                snapshot,
                command,
                Code.CONFLICT,
                f"another engine is up: {differing}",
                "`llamactl apply` brings it there, live where that is possible; --dry-run says how",
            )
    return _start(snapshot, command, ev.LoadCause.UP, now)


def _start_again(snapshot: Snapshot, command: ev.Start, now: float) -> Step:
    if snapshot.desired is None:
        message = "there is no engine to start: none was asked for yet"
        return _reject(snapshot, command, Code.NO_SPEC, message, "use `llamactl up`")
    if snapshot.desired.context is not None and snapshot.state in IDLE:
        return _of_a_run(snapshot, command)
    return _start(snapshot, command, ev.LoadCause.START, now)


def _start(
    snapshot: Snapshot, command: ev.Up | ev.Start | ev.Restart, cause: ev.LoadCause, now: float
) -> Step:
    if snapshot.state in IDLE:
        waiting = (*snapshot.waiting, command.operation)
        return spawn(replace(snapshot, waiting=waiting, crashes=0, deferred=0), cause, now)
    if snapshot.state is EngineState.STARTING:
        return replace(snapshot, waiting=(*snapshot.waiting, command.operation)), ()
    if snapshot.state in SERVING:
        pid = snapshot.process.engine.pid if snapshot.process else None
        result = LifecycleResult(outcome=LifecycleOutcome.ALREADY_UP, pid=pid)
        return snapshot, (ev.Finish(command.operation, result),)
    return _busy(snapshot, command, "the engine is being stopped")


def _restart(snapshot: Snapshot, command: ev.Restart, now: float) -> Step:
    if snapshot.desired is None:
        message = "there is no engine to restart: none was asked for yet"
        return _reject(snapshot, command, Code.NO_SPEC, message, "use `llamactl up`")
    if snapshot.state in IDLE and snapshot.desired.context is not None:
        return _of_a_run(snapshot, command)
    if snapshot.state in IDLE:
        return _start(snapshot, command, ev.LoadCause.RESTART, now)
    if snapshot.state is EngineState.READY:
        asked = replace(snapshot, waiting=(command.operation,), crashes=0)
        return wind_down(asked, After.START, now, may_lose=command.accept_loss)
    return _busy(snapshot, command, f"the engine is {snapshot.state}")


def _of_a_run(snapshot: Snapshot, command: ev.Start | ev.Restart) -> Step:
    message = "the last engine was one of `llamactl run`: it lives for its owner, and has none"
    return _reject(snapshot, command, Code.NO_SPEC, message, "use `llamactl run` or `llamactl up`")


def _stop(snapshot: Snapshot, command: ev.Stop | ev.Down, now: float) -> Step:
    if isinstance(command, ev.Down):
        after, effects = _stop_any(replace(snapshot, closing=True), command, now)
        return after, (*effects, ev.Exit()) if after.state in IDLE else effects
    if not command.now and snapshot.owner is not None:
        problem = owner.owned(snapshot.owner)
        hint = "end that one, or `llamactl stop --now`"
        return snapshot, (ev.Reject(command.operation, problem.model_copy(update={"hint": hint})),)
    return _stop_any(snapshot, command, now)


def _stop_any(snapshot: Snapshot, command: ev.Stop | ev.Down, now: float) -> Step:
    unowned, left = owner.ended(snapshot, Departure.STOPPED, now)
    after, effects = _stop_engine(unowned, command, now)
    return after, (*left, *effects)


def _stop_engine(snapshot: Snapshot, command: ev.Stop | ev.Down, now: float) -> Step:
    joining = snapshot.state is EngineState.STOPPING and snapshot.after is After.REST
    if joining:
        joined = replace(snapshot, waiting=(*snapshot.waiting, command.operation))
        return carrying.hurry(joined, now) if command.now else (joined, ())
    problem = Problem(
        code=Code.SUPERSEDED, message="the engine was stopped before this came to its end"
    )
    snapshot, given_up = applies.give_up(snapshot, problem)
    snapshot, overtaken = apply.overtaken(snapshot)
    asked = replace(unasked(snapshot), intent=Intent.DOWN)
    left = [name for name in snapshot.waiting if name not in (*asked.changing, *overtaken)]
    superseded = (*given_up, *(ev.Fail(name, problem) for name in left))
    if snapshot.state in IDLE:
        already = snapshot.state is EngineState.STOPPED
        outcome = LifecycleOutcome.ALREADY_STOPPED if already else LifecycleOutcome.STOPPED
        return rest(asked), (*superseded, stopped(snapshot, command.operation, outcome))
    asked = replace(asked, waiting=(command.operation, *overtaken))
    if snapshot.state is EngineState.STOPPING:
        asked = replace(asked, after=After.REST)
        after, effects = carrying.hurry(asked, now) if command.now else (asked, ())
        return after, (*superseded, *effects)
    carries = snapshot.settings.carry_on_stop
    after, effects = wind_down(asked, After.REST, now, carries=carries, waits=not command.now)
    return after, (*superseded, *effects)


def _reconfigure(snapshot: Snapshot, command: ev.Reconfigure) -> Step:
    if snapshot.state is EngineState.READY and snapshot.process is not None:
        send = ev.SendReconfigure(
            snapshot.generation, snapshot.process, command.operation, command.change
        )
        state = EngineState.RECONFIGURING
        return replace(snapshot, state=state, waiting=(command.operation,)), (send,)
    if is_restart(snapshot):
        return _busy(snapshot, command, "the engine is being relaunched")
    if snapshot.state in {EngineState.STARTING, EngineState.RECONFIGURING}:
        return _busy(snapshot, command, f"the engine is {snapshot.state}")
    message = f"there is no running engine to reconfigure: it is {snapshot.state}"
    return _reject(snapshot, command, Code.ENGINE_STOPPED, message, "use `llamactl start`")


def _follow(snapshot: Snapshot, command: ev.Apply | ev.Reload) -> Step:
    if isinstance(command, ev.Reload):
        return snapshot, (ev.ReadConfig(command.operation),)
    if snapshot.owner is not None and applies.waits(snapshot, snapshot.owner.id):
        return _busy(snapshot, command, f"the run with pid {snapshot.owner.pid} is being served")
    return applies.ask(snapshot, command)


def _page(snapshot: Snapshot, command: ev.PageVerb) -> Step:
    if (problem := not_serving(snapshot)) is not None:
        return snapshot, (ev.Reject(command.operation, problem),)
    assert snapshot.process is not None
    if len(snapshot.paging) >= PAGING_MAX:
        why = f"{PAGING_MAX} page verbs wait for their slots"
        hint = "wait for one of them; the engine takes no more at once"
        return _reject(snapshot, command, Code.OPERATION_IN_PROGRESS, why, hint)
    paging = (*snapshot.paging, command.operation)
    return replace(snapshot, paging=paging), (ev.SendPage(snapshot.process, command),)


def _busy(snapshot: Snapshot, command: Command, why: str) -> Step:
    hint = "wait for the operation that runs, or `llamactl stop`"
    return _reject(snapshot, command, Code.OPERATION_IN_PROGRESS, why, hint)


def _reject(
    snapshot: Snapshot, command: Command, code: Code, message: str, hint: str | None = None
) -> Step:
    problem = Problem(code=code, message=message, hint=hint)
    return snapshot, (ev.Reject(command.operation, problem),)
