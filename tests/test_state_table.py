"""The state machine as a table: what every event does in every state.

Of each event: the state that it leads to, then the effects in their order. An event that a state
does not list changes nothing there and has no effect.
"""

from __future__ import annotations

import pytest
from llamactl_supervisor import events as ev
from llamactl_supervisor.models import After, CarryReport, OperationKind, Problem
from llamactl_supervisor.state import reduce
from machine import (
    ALL_BACK,
    ALL_KEPT,
    AT,
    CHANGE,
    COLD,
    CONFIG,
    FACTS,
    NEXT_OWNER,
    NOW,
    ONE_LOST,
    OTHER,
    PAGED,
    PROBLEM,
    QUIET,
    READY,
    RECORD,
    REQUEST,
    SPEC,
    STATES,
    WEDGED,
    WIDE,
    WIDE_A,
    planned,
    process,
    receipt,
    run,
)

TABLE = """
stopped
    up, up another -> starting: spawn
    start, restart, reconfigure, page -> stays: reject
    stop, config read -> stays: ok
    down -> stays: ok exit
    reload -> stays: read
    config broken -> stays: fail
    found -> stopping: watch term
    found ending -> stopping: watch
    hand over -> stays: exit
    apply, apply cold -> stays: plan
    run -> stays: plan
    run again -> stays: reject
wanted
    up, up another, start, restart, resume -> starting: spawn
    stop, config read -> stays: ok
    down -> stays: ok exit
    reconfigure, page -> stays: reject
    reload -> stays: read
    config broken -> stays: fail
    found -> starting: watch
    found ending -> stopping: watch
    found dead -> stays: record
    hand over -> stays: exit
    apply, apply cold -> stays: plan
    run -> stays: plan
    run again -> stays: reject
spawning
    up, start -> stays
    up another, restart, reconfigure, page -> stays: reject
    stop, down -> stopping: fail
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    tick -> stopping
    spawned -> stays: watch
    spawn failed -> failed: load fail
    apply, apply cold -> stays
    run, run again -> stays: reject
starting
    up, start, holder lost, holder stopped -> stays
    up another, restart, reconfigure, page -> stays: reject
    stop, down -> stopping: fail term
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    tick -> stopping: term
    healthy -> ready: ok load
    healthy quiet -> stays: bring
    exited -> failed: load record fail
    apply, apply cold -> stays
    run, run again -> stays: reject
ready
    up, start -> stays: ok
    up another -> stays: reject
    stop, restart, down -> stopping: write
    wedged -> stopping: term
    reconfigure, config read -> reconfiguring: send
    reload -> stays: read
    config broken -> stays: fail
    page -> stays: send
    hand over -> stays: exit
    tick, holder lost, holder stopped, socket gone -> stays
    exited -> crashed: record
    reconfigured -> stays: avoided
    apply, apply cold -> stays: plan
    run, run again -> stays: reject
paging
    up, start, page ended -> stays: ok
    up another -> stays: reject
    stop, restart, down -> stopping: write
    wedged -> stopping: term
    reconfigure, config read -> reconfiguring: send
    reload -> stays: read
    config broken -> stays: fail
    page -> stays: send
    hand over -> stays: exit
    tick, holder lost, holder stopped, socket gone -> stays
    exited -> crashed: fail record
    reconfigured -> stays: avoided
    apply, apply cold -> stays: plan
    run, run again -> stays: reject
reconfiguring
    up, start -> stays: ok
    up another, restart, reconfigure -> stays: reject
    stop, down -> stopping: write
    wedged -> stopping: term
    reload -> stays: read
    config read, config broken -> stays: fail
    page -> stays: send
    hand over, tick, holder lost, holder stopped, socket gone -> stays
    exited -> crashed: record fail
    reconfigured -> ready: avoided ok
    not reconfigured -> ready: fail
    apply, apply cold -> stays
    run, run again -> stays: reject
reloading
    up, start -> stays: ok
    up another, restart, reconfigure -> stays: reject
    stop, down -> stopping: write
    wedged -> stopping: term
    reload -> stays: read
    config read, hand over, tick, holder lost, holder stopped, socket gone -> stays
    config broken -> stays: fail
    page -> stays: send
    exited -> crashed: record fail
    reconfigured -> ready: avoided ok
    not reconfigured -> ready: fail
    apply, apply cold -> stays
    run, run again -> stays: reject
reloading twice
    up, start -> stays: ok
    up another, restart, reconfigure -> stays: reject
    stop, down -> stopping: write
    wedged -> stopping: term
    reload -> stays: read
    config read, hand over, tick, holder lost, holder stopped, socket gone -> stays
    config broken -> stays: fail
    page -> stays: send
    exited -> crashed: record fail read
    reconfigured -> ready: avoided ok read
    not reconfigured -> ready: fail read
    apply, apply cold -> stays
    run, run again -> stays: reject
handing over
    up, up another, start, stop, restart, reconfigure, reload, page -> stays: reject
    down -> stopping: write
    config read, config broken -> stays: fail
    tick, holder lost, holder stopped, socket gone -> stays
    wedged -> stopping: term
    exited -> crashed: record fail exit
    reconfigured -> ready: avoided ok exit
    not reconfigured -> ready: fail exit
    apply, apply cold -> stays: reject
    run, run again -> stays: reject
writing
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, holder lost, carry moved -> stays
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    tick, carried out, carried out less, not asked -> stays: carried term
    exited -> stopped: record ok
    reconfigured -> stays: avoided
    apply, apply cold -> stays
    run -> stays
    run again -> stays: reject
writing to restart
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, config read, config broken -> stays: fail
    reload -> stays: read
    hand over -> stays: exit
    holder lost, carry moved -> stays
    carried out -> stays: carried term
    tick, carried out less, not asked -> ready: fail on
    exited -> starting: record spawn
    reconfigured -> stays: avoided
    apply, apply cold -> stays
    run, run again -> stays: reject
writing to relaunch
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down -> stays
    config read, config broken -> stays: fail
    reload -> stays: read
    hand over -> stays: exit
    holder lost, carry moved -> stays
    carried out -> stays: carried term
    tick, carried out less, not asked -> ready: fail on
    exited -> starting: record spawn
    reconfigured -> stays: avoided
    apply, apply cold -> stays
    run, run again -> stays: reject
bringing back
    up, start, holder lost, carry moved -> stays
    up another, restart, reconfigure, page -> stays: reject
    stop, down -> stopping: fail term
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    tick -> stopping: term
    carried in -> ready: ok load carried
    exited -> failed: load record fail
    apply, apply cold -> stays
    run, run again -> stays: reject
    holder stopped -> stays
stopping
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, holder lost -> stays
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    tick -> stays: kill
    exited -> stopped: ok
    reconfigured -> stays: avoided
    apply, apply cold -> stays
    run -> stays
    run again -> stays: reject
stopping amid a change
    run -> stays
    run again -> stays: reject
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, holder lost, hand over -> stays
    reload -> stays: read
    config read, config broken -> stays: fail
    tick -> stays: kill
    exited -> stopped: fail ok
    reconfigured -> stays: avoided ok
    not reconfigured -> stays: fail
    apply, apply cold -> stays
stopping amid an apply
    up, up another, start, restart, reconfigure, page, run again -> stays: reject
    stop, down, apply, apply cold, run, hand over, carry moved, holder lost -> stays
    reload -> stays: read
    config read, config broken, not reconfigured -> stays: fail
    tick, carried out, carried out less, not asked -> stays: carried term
    exited -> stopped: fail record ok
    reconfigured -> stays: avoided ok
stopping amid a reload
    run -> stays
    run again -> stays: reject
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, holder lost, hand over, config read -> stays
    reload -> stays: read
    config broken -> stays: fail
    tick -> stays: kill
    exited -> stopped: fail ok
    reconfigured -> stays: avoided ok
    not reconfigured -> stays: fail
    apply, apply cold -> stays
stopping while spawning
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down -> stays
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    spawned -> stays: watch term
    spawn failed -> stopped: ok load
    apply, apply cold -> stays
    run -> stays
    run again -> stays: reject
restarting
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, config read, config broken -> stays: fail
    reload -> stays: read
    hand over -> stays: exit
    tick -> stays: kill
    holder lost -> stays
    exited -> starting: spawn
    reconfigured -> stays: avoided
    apply, apply cold -> stays
    run, run again -> stays: reject
replacing
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, holder lost -> stays
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    tick -> stays: kill
    exited -> crashed: record
    reconfigured -> stays: avoided
    apply, apply cold -> stays
    run, run again -> stays: reject
load stalled
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, config read, config broken -> stays: fail
    reload -> stays: read
    hand over -> stays: exit
    tick -> stays: kill
    holder lost -> stays
    exited -> failed: load record fail
    apply, apply cold -> stays
    run, run again -> stays: reject
going down
    up, up another, start, stop, restart, reconfigure, reload, page -> stays: reject
    down, hand over, holder lost -> stays
    config read, config broken -> stays: fail
    tick -> stays: kill
    exited -> stopped: ok exit
    reconfigured -> stays: avoided
    apply, apply cold -> stays: reject
    run, run again -> stays: reject
planning
    up, start -> stays: ok
    up another -> stays: reject
    stop, down -> stopping: fail write
    restart -> stopping: write
    wedged -> stopping: term
    reconfigure, config read, planned -> reconfiguring: send
    reload -> stays: read
    config broken, not planned, not rebased -> stays: fail
    apply, apply cold -> stays
    page -> stays: send
    rebased -> stays: plan
    hand over -> stays: exit
    tick, socket gone, holder lost, holder stopped -> stays
    exited -> crashed: record
    reconfigured -> stays: avoided
    run, run again -> stays: reject
rebasing
    up, start -> stays: ok
    up another, run, run again -> stays: reject
    stop, down -> stopping: fail write
    restart -> stopping: write
    reconfigure, config read -> reconfiguring: send
    reload -> stays: read
    config broken, not planned, not rebased -> stays: fail
    apply, apply cold, tick, socket gone, holder lost, holder stopped, observed -> stays
    planned, rebased -> stays: rebase
    page -> stays: send
    hand over -> stays: exit
    wedged -> stopping: term
    exited -> crashed: record
    reconfigured -> stays: avoided
applying
    up, start -> stays: ok
    up another, restart, reconfigure -> stays: reject
    stop, down -> stopping: write
    wedged -> stopping: term
    reload -> stays: read
    config read, config broken -> stays: fail
    apply, apply cold, hand over, tick, socket gone, holder lost, holder stopped -> stays
    page -> stays: send
    exited -> crashed: record fail
    reconfigured -> ready: avoided ok
    not reconfigured -> ready: fail
    run, run again -> stays: reject
apply waits
    up, start -> stays: ok
    up another, restart, reconfigure -> stays: reject
    stop, down -> stopping: fail write
    reload -> stays: read
    config read, config broken -> stays: fail
    page -> stays: send
    apply, apply cold, hand over, tick, socket gone, holder lost, holder stopped -> stays
    wedged -> stopping: term
    exited -> crashed: record fail plan
    reconfigured -> ready: avoided ok plan
    not reconfigured -> ready: fail plan
    run, run again -> stays: reject
relaunching
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down -> stays
    config read, config broken -> stays: fail
    reload -> stays: read
    apply, apply cold, holder lost -> stays
    hand over -> stays: exit
    tick -> stays: kill
    exited -> starting: spawn
    reconfigured -> stays: avoided
    run, run again -> stays: reject
relaunched
    up, restart, reconfigure, page -> stays: reject
    up another, start, apply, apply cold, last words -> stays
    stop, down -> stopping
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    tick -> stopping
    run, run again -> stays: reject
crashed
    up, up another, start, restart, tick -> starting: spawn
    stop -> stopped: ok
    down -> stopped: ok exit
    reconfigure, page -> stays: reject
    last words -> stays
    reload -> stays: read
    config read -> stays: ok
    config broken -> stays: fail
    hand over -> stays: exit
    apply, apply cold -> stays: plan
    run -> stays: plan
    run again -> stays: reject
lacking files
    up, up another, start, restart, files there, resume -> starting: spawn
    stop -> stopped: ok
    down -> stopped: ok exit
    reconfigure, page -> stays: reject
    last words -> stays
    reload -> stays: read
    config read -> stays: ok
    config broken -> stays: fail
    hand over -> stays: exit
    tick -> stays: look
    files missing -> stays
    apply, apply cold, run -> stays: plan
    run again -> stays: reject
failed
    up, up another, start, restart -> starting: spawn
    stop -> stopped: ok
    down -> stopped: ok exit
    reconfigure, page -> stays: reject
    last words -> stays
    reload -> stays: read
    config read -> stays: ok
    config broken -> stays: fail
    hand over -> stays: exit
    apply, apply cold -> stays: plan
    run -> stays: plan
    run again -> stays: reject
run asked
    up, up another, start, stop, restart, reconfigure, page, run, run again -> stays: reject
    apply, apply cold -> stays: reject
    down -> stays: fail ok exit
    reload -> stays: read
    config read -> stays: ok
    config broken, left -> stays: fail
    found -> stopping: watch term
    found ending -> stopping: watch
    hand over -> stays: exit
run loading
    holder stopped -> stays
    up, up another, stop, restart, reconfigure, page, run, run again -> stays: reject
    start, apply, apply cold, holder lost -> stays
    down -> stopping: fail term
    reload -> stays: read
    config read, config broken -> stays: fail
    left -> stopping: fail left term
    hand over -> stays: exit
    tick -> stopping: term tell
    healthy -> ready: ok load tell
    exited -> stopped: load record tell fail
    healthy quiet -> stays: bring
owned
    holder stopped -> stays
    up, up another, stop, run, run again -> stays: reject
    start, config read -> stays: ok
    restart, down -> stopping: write
    wedged -> stopping: term
    reconfigure -> reconfiguring: send
    reload -> stays: read
    config broken -> stays: fail
    apply, apply cold -> stays: plan
    page -> stays: send
    left, tick, socket gone, holder lost -> stays
    hand over -> stays: exit
    exited -> stopped: record tell
    reconfigured -> stays: avoided tell
lingering
    holder stopped -> stays
    up, up another -> stays: reject
    start, config read -> stays: ok
    stop, down, tick -> stopping: left write
    pressure -> stopping: left term
    restart -> stopping: write
    wedged -> stopping: term
    reconfigure -> reconfiguring: send
    reload -> stays: read
    config broken -> stays: fail
    apply, apply cold, run -> stays: plan
    page -> stays: send
    run again -> stays: ok tell
    hand over -> stays: exit
    socket gone, holder lost -> stays
    exited -> stopped: record left
    reconfigured -> stays: avoided
"""

GONE = Problem(code="engine_socket_gone", message="nobody listens")
EVENTS: dict[str, ev.Event] = {
    "up": ev.Up("o", REQUEST),
    "up another": ev.Up("o", OTHER),
    "start": ev.Start("o"),
    "stop": ev.Stop("o"),
    "restart": ev.Restart("o"),
    "down": ev.Down("o"),
    "reconfigure": ev.Reconfigure("o", CHANGE),
    "reload": ev.Reload("o"),
    "config read": ev.ConfigRead("c", CONFIG),
    "config broken": ev.ConfigBroken("c", PROBLEM),
    "apply": WIDE,
    "apply cold": COLD,
    "planned": planned(READY, WIDE_A),
    "not planned": ev.Planned("a", PROBLEM),
    "rebased": ev.Rebased("a", WIDE.request, WIDE.spec),
    "not rebased": ev.Rebased("a", WIDE.request, PROBLEM),
    "page": ev.Page("o", OperationKind.PAGE_OUT, "fox", 1),
    "page ended": ev.PageEnded("p", PAGED),
    "resume": ev.Resume(),
    "found": ev.Found(process(1)),
    "found ending": ev.Found(process(1), stopping=After.START),
    "found dead": ev.FoundDead(process(1), RECORD),
    "run": run(NEXT_OWNER),
    "run again": ev.Run("again", NEXT_OWNER.model_copy(update={"id": "again"}), None, "i1"),
    "left": ev.Left("run"),
    "left another": ev.Left("next"),
    "pressure": ev.Pressure(),
    "hand over": ev.HandOver(),
    "tick": ev.Tick(),
    "spawned": ev.Spawned(1, process(1), SPEC),
    "spawn failed": ev.SpawnFailed(1, PROBLEM, 0.5),
    "moved": ev.Moved(1),
    "listens": ev.Listens(1),
    "healthy": ev.Healthy(1, FACTS, AT),
    "healthy quiet": ev.Healthy(1, QUIET, AT),
    "carry moved": ev.CarryMoved(1, "writing 1 of 2 conversations", ONE_LOST),
    "carried out": ev.CarriedOut(1, ALL_KEPT),
    "carried out less": ev.CarriedOut(1, ONE_LOST),
    "not asked": ev.CarriedOut(1, CarryReport(problem=PROBLEM)),
    "carried in": ev.CarriedIn(1, ALL_BACK, FACTS, AT),
    "socket gone": ev.SocketGone(1, GONE, AT),
    "holder lost": ev.HolderLost(1),
    "holder stopped": ev.HolderLooked(1, PROBLEM),
    "observed": ev.Observed(1, FACTS, NOW, AT),
    "wedged": ev.Wedged(1, WEDGED),
    "exited": ev.Exited(1, RECORD, 0.5),
    "reconfigured": ev.Reconfigured(1, CHANGE, receipt(), "me", AT),
    "last words": ev.LastWords(RECORD, RECORD.model_copy(update={"exit_code": 7})),
    "files there": ev.LookedForFiles(1, there=True),
    "files missing": ev.LookedForFiles(1, there=False),
    "not reconfigured": ev.ReconfigureFailed(1, PROBLEM),
}
EFFECTS = {
    ev.Spawn: "spawn",
    ev.LookForFiles: "look",
    ev.Watch: "watch",
    ev.SendReconfigure: "send",
    ev.SendPage: "send",
    ev.CarryOut: "write",
    ev.CarryIn: "bring",
    ev.CarryOff: "on",
    ev.RecordCarried: "carried",
    ev.PlanApply: "plan",
    ev.Finish: "ok",
    ev.Fail: "fail",
    ev.Reject: "reject",
    ev.Rebase: "rebase",
    ev.RecordLoad: "load",
    ev.RecordAvoided: "avoided",
    ev.RecordCrash: "record",
    ev.RecordLeft: "left",
    ev.RecordLost: "lost",
    ev.Tell: "tell",
    ev.Exit: "exit",
    ev.ReadConfig: "read",
    ev.UseSettings: "use",
}


def expected() -> dict[tuple[str, str], str]:
    """Read the table."""
    cells: dict[tuple[str, str], str] = {}
    state = ""
    for line in TABLE.strip().splitlines():
        if not line.startswith(" "):
            state = line
            continue
        events, outcome = line.strip().split(" -> ")
        cells |= {(state, event): outcome for event in events.split(", ")}
    return cells


CELLS = expected()


def name(effect: ev.Effect) -> str:
    return effect.step.value if isinstance(effect, ev.Signal) else EFFECTS[type(effect)]


def test_the_table_is_whole() -> None:
    """It names no state and no event that is none, and none of either is missing."""
    assert {state for state, _ in CELLS} == set(STATES)
    assert {event for _, event in CELLS} <= set(EVENTS)
    kinds = {type(event) for event in EVENTS.values()} | {ev.PageFile}
    assert kinds == set(ev.Event.__args__) | set(ev.PageVerb.__args__) - {ev.PageVerb}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_each_cell(state: str, event: str) -> None:
    before = STATES[state]
    due = NOW if before.deadline is None else before.deadline
    after, effects = reduce(before, EVENTS[event], due if event == "tick" else NOW)
    if (state, event) not in CELLS:
        assert (after, effects) == (before, ())
        return
    to, _, done = CELLS[state, event].partition(": ")
    assert after.state == (before.state if to == "stays" else to)
    assert " ".join(map(name, effects)) == done
