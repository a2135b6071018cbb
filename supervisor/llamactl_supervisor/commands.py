"""What each command does in each state: accepted, finished at once, or rejected with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor.errors import Code
from llamactl_supervisor.models import (
    EngineState,
    Intent,
    LifecycleOutcome,
    LifecycleResult,
    Problem,
)
from llamactl_supervisor.plan import Conflict, plan
from llamactl_supervisor.snapshot import (
    IDLE,
    PAGING_MAX,
    SERVING,
    After,
    Snapshot,
    Step,
    rest,
    spawn,
    stop,
)

if TYPE_CHECKING:
    from llamactl_supervisor.events import Command


def obey(snapshot: Snapshot, command: Command, now: float) -> Step:
    """Return the step for `command`; a rejected one leaves the snapshot as it was."""
    if (snapshot.closing or snapshot.leaving) and not isinstance(command, ev.Down):
        return _reject(snapshot, command, Code.SHUTTING_DOWN, "the daemon is shutting down")
    match command:
        case ev.Up():
            return _up(snapshot, command, now)
        case ev.Start():
            return _start_again(snapshot, command, now)
        case ev.Restart():
            return _restart(snapshot, command, now)
        case ev.Stop():
            return _stop(snapshot, command, now)
        case ev.Down():
            after, effects = _stop(replace(snapshot, closing=True), command, now)
            return after, (*effects, ev.Exit()) if after.state in IDLE else effects
        case ev.Reconfigure():
            return _reconfigure(snapshot, command)
        case ev.Reload():
            return snapshot, (ev.ReadConfig(command.operation),)
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
        verdict = plan(snapshot.running, snapshot.override, command.request, exact=command.exact)
        if isinstance(verdict, Conflict):
            differing = ", ".join(
                f"{name} is {running!r}, asked for {asked!r}"
                for name, (running, asked) in verdict.fields.items()
            )
            return _reject(
                snapshot,
                command,
                Code.CONFLICT,
                f"another engine is up: {differing}",
                "`llamactl reconfigure` changes n_ctx and n_seq live; otherwise `llamactl down`",
            )
    return _start(snapshot, command, ev.LoadCause.UP, now)


def _start_again(snapshot: Snapshot, command: ev.Start, now: float) -> Step:
    if snapshot.desired is None:
        message = "there is no engine to start: none was asked for yet"
        return _reject(snapshot, command, Code.NO_SPEC, message, "use `llamactl up`")
    return _start(snapshot, command, ev.LoadCause.START, now)


def _start(
    snapshot: Snapshot, command: ev.Up | ev.Start | ev.Restart, cause: ev.LoadCause, now: float
) -> Step:
    if snapshot.state in IDLE:
        waiting = (*snapshot.waiting, command.operation)
        return spawn(replace(snapshot, waiting=waiting, crashes=0), cause, now)
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
    if snapshot.state in IDLE:
        return _start(snapshot, command, ev.LoadCause.RESTART, now)
    if snapshot.state is EngineState.READY:
        asked = replace(snapshot, waiting=(command.operation,), crashes=0)
        return stop(asked, After.START, now)
    return _busy(snapshot, command, f"the engine is {snapshot.state}")


def _stop(snapshot: Snapshot, command: ev.Stop | ev.Down, now: float) -> Step:
    joining = snapshot.state is EngineState.STOPPING and snapshot.after is After.REST
    if joining:
        return replace(snapshot, waiting=(*snapshot.waiting, command.operation)), ()
    problem = Problem(
        code=Code.SUPERSEDED, message="the engine was stopped before this came to its end"
    )
    superseded = tuple(ev.Fail(name, problem) for name in snapshot.waiting)
    asked = replace(snapshot, intent=Intent.DOWN, waiting=())
    if snapshot.state in IDLE:
        stopped = snapshot.state is not EngineState.STOPPED
        outcome = LifecycleOutcome.STOPPED if stopped else LifecycleOutcome.ALREADY_STOPPED
        finish = ev.Finish(command.operation, LifecycleResult(outcome=outcome))
        return rest(asked), (*superseded, finish)
    asked = replace(asked, waiting=(command.operation,))
    if snapshot.state is EngineState.STOPPING:
        return replace(asked, after=After.REST), superseded
    after, effects = stop(asked, After.REST, now)
    return after, (*superseded, *effects)


def _reconfigure(snapshot: Snapshot, command: ev.Reconfigure) -> Step:
    if snapshot.state is EngineState.READY and snapshot.process is not None:
        send = ev.SendReconfigure(
            snapshot.generation, snapshot.process, command.operation, command.change
        )
        state = EngineState.RECONFIGURING
        return replace(snapshot, state=state, waiting=(command.operation,)), (send,)
    if snapshot.state in {EngineState.STARTING, EngineState.RECONFIGURING}:
        return _busy(snapshot, command, f"the engine is {snapshot.state}")
    message = f"there is no running engine to reconfigure: it is {snapshot.state}"
    return _reject(snapshot, command, Code.ENGINE_STOPPED, message, "use `llamactl start`")


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
