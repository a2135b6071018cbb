"""The state machine as a table: what every event does in every state.

Of each event: the state that it leads to, then the effects in their order. An event that a state
does not list changes nothing there and has no effect.
"""

from __future__ import annotations

import pytest
from llamactl_supervisor import events as ev
from llamactl_supervisor.models import OperationKind
from llamactl_supervisor.state import reduce
from machine import (
    AT,
    CHANGE,
    CONFIG,
    FACTS,
    NOW,
    OTHER,
    PAGED,
    PROBLEM,
    RECORD,
    REQUEST,
    STATES,
    WEDGED,
    process,
    receipt,
)

TABLE = """
stopped
    up, up another -> starting: spawn
    start, restart, reconfigure, page -> stays: reject
    stop, config read -> stays: ok
    down -> stays: ok exit
    reload -> stays: read
    config broken -> stays: fail
    found -> stopping: watch
    hand over -> stays: exit
wanted
    up, up another, start, restart, resume -> starting: spawn
    stop, config read -> stays: ok
    down -> stays: ok exit
    reconfigure, page -> stays: reject
    reload -> stays: read
    config broken -> stays: fail
    found -> starting: watch
    hand over -> stays: exit
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
starting
    up, start, holder lost -> stays
    up another, restart, reconfigure, page -> stays: reject
    stop, down -> stopping: fail term
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    tick -> stopping: term
    healthy -> ready: ok load
    exited -> failed: load record fail
ready
    up, start -> stays: ok
    up another -> stays: reject
    stop, restart, down, wedged -> stopping: term
    reconfigure, config read -> reconfiguring: send
    reload -> stays: read
    config broken -> stays: fail
    page -> stays: send
    hand over -> stays: exit
    tick, holder lost -> stays
    exited -> crashed: record
    reconfigured -> stays: avoided
paging
    up, start, page ended -> stays: ok
    up another -> stays: reject
    stop, restart, down, wedged -> stopping: fail term
    reconfigure, config read -> reconfiguring: send
    reload -> stays: read
    config broken -> stays: fail
    page -> stays: send
    hand over -> stays: exit
    tick, holder lost -> stays
    exited -> crashed: fail record
    reconfigured -> stays: avoided
reconfiguring
    up, start -> stays: ok
    up another, restart, reconfigure -> stays: reject
    stop, down, wedged -> stopping: fail term
    reload -> stays: read
    config read, config broken -> stays: fail
    page -> stays: send
    hand over, tick, holder lost -> stays
    exited -> crashed: record fail
    reconfigured -> ready: avoided ok
    not reconfigured -> ready: fail
reloading
    up, start -> stays: ok
    up another, restart, reconfigure -> stays: reject
    stop, down, wedged -> stopping: fail term
    reload -> stays: read
    config read, hand over, tick, holder lost -> stays
    config broken -> stays: fail
    page -> stays: send
    exited -> crashed: record fail
    reconfigured -> ready: avoided ok
    not reconfigured -> ready: fail
reloading twice
    up, start -> stays: ok
    up another, restart, reconfigure -> stays: reject
    stop, down, wedged -> stopping: fail term read
    reload -> stays: read
    config read, hand over, tick, holder lost -> stays
    config broken -> stays: fail
    page -> stays: send
    exited -> crashed: record fail read
    reconfigured -> ready: avoided ok read
    not reconfigured -> ready: fail read
handing over
    up, up another, start, stop, restart, reconfigure, reload, page -> stays: reject
    down -> stopping: fail term
    config read, config broken -> stays: fail
    tick, holder lost -> stays
    wedged -> stopping: fail term exit
    exited -> crashed: record fail exit
    reconfigured -> ready: avoided ok exit
    not reconfigured -> ready: fail exit
stopping
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, holder lost -> stays
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    tick -> stays: kill
    exited -> stopped: ok
    reconfigured -> stays: avoided
stopping while spawning
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down -> stays
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    spawned -> stays: watch term
    spawn failed -> stopped: ok
restarting
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, config read, config broken -> stays: fail
    reload -> stays: read
    hand over -> stays: exit
    tick -> stays: kill
    holder lost -> stays
    exited -> starting: spawn
    reconfigured -> stays: avoided
replacing
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, holder lost -> stays
    reload -> stays: read
    config read, config broken -> stays: fail
    hand over -> stays: exit
    tick -> stays: kill
    exited -> crashed: record
    reconfigured -> stays: avoided
load stalled
    up, up another, start, restart, reconfigure, page -> stays: reject
    stop, down, config read, config broken -> stays: fail
    reload -> stays: read
    hand over -> stays: exit
    tick -> stays: kill
    holder lost -> stays
    exited -> failed: load record fail
going down
    up, up another, start, stop, restart, reconfigure, reload, page -> stays: reject
    down, hand over, holder lost -> stays
    config read, config broken -> stays: fail
    tick -> stays: kill
    exited -> stopped: ok exit
    reconfigured -> stays: avoided
crashed
    up, up another, start, restart, tick -> starting: spawn
    stop -> stopped: ok
    down -> stopped: ok exit
    reconfigure, page -> stays: reject
    reload -> stays: read
    config read -> stays: ok
    config broken -> stays: fail
    hand over -> stays: exit
failed
    up, up another, start, restart -> starting: spawn
    stop -> stopped: ok
    down -> stopped: ok exit
    reconfigure, page -> stays: reject
    reload -> stays: read
    config read -> stays: ok
    config broken -> stays: fail
    hand over -> stays: exit
"""

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
    "page": ev.Page("o", OperationKind.PAGE_OUT, "fox", 1),
    "page ended": ev.PageEnded("p", PAGED),
    "resume": ev.Resume(),
    "found": ev.Found(process(1)),
    "hand over": ev.HandOver(),
    "tick": ev.Tick(),
    "spawned": ev.Spawned(1, process(1)),
    "spawn failed": ev.SpawnFailed(1, PROBLEM, 0.5),
    "moved": ev.Moved(1),
    "healthy": ev.Healthy(1, FACTS, AT),
    "holder lost": ev.HolderLost(1),
    "observed": ev.Observed(1, FACTS, NOW, AT),
    "wedged": ev.Wedged(1, WEDGED),
    "exited": ev.Exited(1, RECORD, 0.5),
    "reconfigured": ev.Reconfigured(1, CHANGE, receipt(), "me", AT),
    "not reconfigured": ev.ReconfigureFailed(1, PROBLEM),
}
EFFECTS = {
    ev.Spawn: "spawn",
    ev.Watch: "watch",
    ev.SendReconfigure: "send",
    ev.SendPage: "send",
    ev.Finish: "ok",
    ev.Fail: "fail",
    ev.Reject: "reject",
    ev.RecordLoad: "load",
    ev.RecordAvoided: "avoided",
    ev.RecordCrash: "record",
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
