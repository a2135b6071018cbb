"""The state machine in the hands of a test: a snapshot of each state, an event of each kind."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

from llamactl_supervisor import events as ev
from llamactl_supervisor.config import Config, Settings
from llamactl_supervisor.events import EngineFacts, EngineProcess
from llamactl_supervisor.models import (
    EngineConfig,
    EngineRequest,
    ExitRecord,
    FileReceipt,
    Geometry,
    Intent,
    OperationKind,
    PageReceipt,
    Problem,
    ProcessIdentity,
    Receipt,
    ReconfigureRequest,
    UpRequest,
)
from llamactl_supervisor.snapshot import Snapshot
from llamactl_supervisor.state import reduce

if TYPE_CHECKING:
    from llamactl_supervisor.snapshot import Step

NOW = 1000.0
AT = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = Settings(ready_stall_s=60, settle_s=180, crashes_max=2, backoff_base_s=1)
REQUEST = UpRequest(spec=EngineRequest(model="/m.gguf"), engine_path="/bin/llama-server")
OTHER = REQUEST.model_copy(update={"spec": EngineRequest(model="/other.gguf")})
PROBLEM = Problem(code="engine_spawn_failed", message="no")
WEDGED = Problem(code="engine_wedged", message="the engine is wedged", details={"still_s": 30.0})
RECORD = ExitRecord(summary="exited with status 1", at=AT, exit_code=1, last_lines=("oops",))
FACTS = EngineFacts(Geometry(n_ctx=16384, n_seq=2), 1, None)
CHANGE = ReconfigureRequest(n_ctx=131072, n_seq=4)
PAGED = PageReceipt(id_slot=1, page="fox", n_tokens=40, n_bytes=9)
CONFIG = Config(engine=EngineConfig(n_ctx=32768, port=9090, model="/m.gguf"), daemon=SETTINGS)
WRITTEN = FileReceipt(id_slot=1, filename="b", n_tokens=40, n_bytes=9)
EMPTY = Snapshot(seed=UUID(int=0), settings=SETTINGS)


def receipt(outcome: str = "applied") -> Receipt:
    return Receipt.model_validate(
        {
            "outcome": outcome,
            "previous": {"n_ctx": 16384, "n_seq": 2},
            "geometry": {"n_ctx": 131072, "n_seq": 4},
            "pause_ms": 80.0,
            "n_weight_loads": 1,
        }
    )


def process(generation: int) -> EngineProcess:
    engine = ProcessIdentity(pid=1000 + generation, start_ticks=1, boot_id="b")
    holder = ProcessIdentity(pid=2000 + generation, start_ticks=1, boot_id="b")
    return EngineProcess(instance_id=f"i{generation}", engine=engine, holder=holder)


def play(snapshot: Snapshot, *events: ev.Event, now: float = NOW) -> Step:
    """Reduce all events; return the last snapshot and all effects."""
    effects: list[ev.Effect] = []
    for event in events:
        snapshot, more = reduce(snapshot, event, now)
        effects += more
    return snapshot, tuple(effects)


def up(generation: int = 1) -> tuple[ev.Event, ...]:
    return (ev.Up("up", REQUEST), ev.Spawned(generation, process(generation)))


READY, _ = play(EMPTY, *up(), ev.Healthy(1, FACTS, AT))
STATES: dict[str, Snapshot] = {
    "stopped": EMPTY,
    "wanted": replace(EMPTY, desired=REQUEST, intent=Intent.UP, generation=1, loads_recorded=1),
    "spawning": play(EMPTY, ev.Up("up", REQUEST))[0],
    "starting": play(EMPTY, *up())[0],
    "ready": READY,
    "paging": play(READY, ev.Page("p", OperationKind.PAGE_OUT, "fox", 1))[0],
    "reconfiguring": play(READY, ev.Reconfigure("r", CHANGE))[0],
    "reloading": play(READY, ev.ConfigRead("r", CONFIG))[0],
    "reloading twice": play(READY, ev.ConfigRead("r", CONFIG), ev.ConfigRead("q", CONFIG))[0],
    "handing over": play(READY, ev.Reconfigure("r", CHANGE), ev.HandOver())[0],
    "stopping": play(READY, ev.Stop("s"))[0],
    "stopping while spawning": play(EMPTY, ev.Up("up", REQUEST), ev.Stop("s"))[0],
    "restarting": play(READY, ev.Restart("s"))[0],
    "replacing": play(READY, ev.Wedged(1, WEDGED))[0],
    "load stalled": play(play(EMPTY, *up())[0], ev.Tick(), now=NOW + 61)[0],
    "going down": play(READY, ev.Down("d"))[0],
    "crashed": play(READY, ev.Exited(1, RECORD, 0.5))[0],
    "failed": play(EMPTY, *up(), ev.Exited(1, RECORD, 0.5))[0],
}
EVENTS: list[ev.Event] = [
    ev.Up("o", REQUEST),
    ev.Up("o", OTHER),
    ev.Start("o"),
    ev.Stop("o"),
    ev.Restart("o"),
    ev.Down("o"),
    ev.Reconfigure("o", CHANGE),
    ev.Reload("o"),
    ev.Page("o", OperationKind.PAGE_OUT, "fox", 1),
    ev.PageFile("o", OperationKind.PAGE_SPILL, "b", page="fox"),
    ev.PageEnded("p", PAGED),
    ev.PageEnded("p", WRITTEN),
    ev.PageEnded("p", PROBLEM),
    ev.ConfigRead("c", CONFIG),
    ev.ConfigBroken("c", PROBLEM),
    ev.Resume(),
    ev.Resume(CONFIG),
    ev.Resume(CONFIG, load=False),
    ev.Found(process(1)),
    ev.Found(process(1), CONFIG),
    ev.HandOver(),
    ev.Tick(),
]
EVENTS += [
    event
    for generation in (0, 1, 2)
    for event in (
        ev.Spawned(generation, process(generation)),
        ev.SpawnFailed(generation, PROBLEM, 0.5),
        ev.Moved(generation),
        ev.Healthy(generation, FACTS, AT),
        ev.HolderLost(generation),
        ev.Observed(generation, FACTS, NOW, AT),
        ev.Wedged(generation, WEDGED),
        ev.Exited(generation, RECORD, 0.5),
        ev.Reconfigured(generation, CHANGE, receipt(), "me", AT),
        ev.ReconfigureFailed(generation, PROBLEM),
    )
]
