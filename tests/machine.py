"""The state machine in the hands of a test: a snapshot of each state, an event of each kind."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

from llamactl_supervisor import events as ev
from llamactl_supervisor.apply import comes_to
from llamactl_supervisor.config import Config, Settings
from llamactl_supervisor.events import EngineFacts, EngineProcess
from llamactl_supervisor.models import (
    After,
    ApplyRequest,
    CarriedConversation,
    CarryFate,
    CarryReport,
    EngineConfig,
    EngineRequest,
    ExitRecord,
    FileReceipt,
    Geometry,
    Intent,
    OperationKind,
    Owner,
    PageReceipt,
    Problem,
    ProcessContext,
    ProcessIdentity,
    Receipt,
    ReconfigureRequest,
    UpRequest,
)
from llamactl_supervisor.snapshot import Snapshot
from llamactl_supervisor.spec import EngineSpec
from llamactl_supervisor.state import reduce

if TYPE_CHECKING:
    from llamactl_supervisor.snapshot import Step

NOW = 1000.0
AT = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = Settings(ready_stall_s=60, settle_s=180, crashes_max=2, backoff_base_s=1)
REQUEST = UpRequest(spec=EngineRequest(model="/m.gguf"), engine_path="/bin/llama-server")
OTHER = REQUEST.model_copy(update={"spec": EngineRequest(model="/other.gguf")})
PROBLEM = Problem(code="engine_spawn_failed", message="no")
MISSING = Problem(code="file_unreadable", message="the model cannot be read")
WEDGED = Problem(code="engine_wedged", message="the engine is wedged", details={"still_s": 30.0})
RECORD = ExitRecord(summary="exited with status 1", at=AT, exit_code=1, last_lines=("oops",))
FACTS = EngineFacts(Geometry(n_ctx=16384, n_seq=2), 1, None)
CHANGE = ReconfigureRequest(n_ctx=131072, n_seq=4)
PAGED = PageReceipt(id_slot=1, page="fox", n_tokens=40, n_bytes=9)
CONFIG = Config(engine=EngineConfig(n_ctx=32768, port=9090, model="/m.gguf"), daemon=SETTINGS)
WRITTEN = FileReceipt(id_slot=1, filename="b", n_tokens=40, n_bytes=9)
KEPT = CarriedConversation(
    what="slot 0", n_tokens=40, fate=CarryFate.WRITTEN, place="carry-0", file="carry-0"
)
LOST = KEPT.model_copy(update={"what": "page fox", "fate": CarryFate.LOST, "file": "carry-1"})
LOST = LOST.model_copy(update={"place": None, "reason": "there is no space for it"})
BACK = KEPT.model_copy(update={"fate": CarryFate.BACK, "place": "slot 0"})
ALL_KEPT = CarryReport(conversations=(KEPT,), took_s=2.0, quiet_s=2.0)
ONE_LOST = CarryReport(conversations=(KEPT, LOST), took_s=2.0, quiet_s=2.0)
ALL_BACK = CarryReport(conversations=(BACK,), took_s=1.0, quiet_s=1.0)
QUIET = replace(FACTS, is_quiet=True)
SPEC = EngineSpec(
    build="b",
    build_content="e1",
    n_ctx=16384,
    n_seq=2,
    kv_unified=False,
    options={"--model": (("/m.gguf",),)},
    classes={"--model": "model"},
    files={},
    context={},
)
WIDE = ev.Apply(
    "o",
    REQUEST.model_copy(update={"spec": EngineRequest(model="/m.gguf", n_ctx=131072, n_seq=4)}),
    SPEC.with_geometry(131072, 4, None),
    "me",
)
COLD = ev.Apply(
    "o", OTHER, SPEC.model_copy(update={"options": {"--model": (("/other.gguf",),)}}), "me"
)
PATCH = ev.Apply(
    "o",
    REQUEST.model_copy(update={"spec": EngineRequest(model="/m.gguf", n_seq=3)}),
    SPEC.with_geometry(16384, 3, None),
    "me",
    ApplyRequest(engine=EngineConfig(n_seq=3)),
)
OWNER = Owner(id="run", pid=7, host="127.0.0.1", port=9000, linger_s=10)
NEXT_OWNER = OWNER.model_copy(update={"id": "next", "pid": 8, "port": 9001})
CONTEXT = ProcessContext(cwd="/", affinity=(0,))
RUN_REQUEST = REQUEST.model_copy(update={"context": CONTEXT})
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
    return (ev.Up("up", REQUEST), ev.Spawned(generation, process(generation), SPEC))


WRITTEN_OUT = ev.CarriedOut(1, ALL_KEPT)


def planned(snapshot: Snapshot, command: ev.Apply) -> ev.Planned:
    """Return what is found out of an apply when nothing speaks against it."""
    return ev.Planned(command.operation, comes_to(snapshot, command.spec))


def run(owner: Owner, spec: EngineSpec = SPEC) -> ev.Run:
    """Return the event of a run that asks for this engine."""
    return ev.Run(owner.id, owner, ev.Apply(owner.id, RUN_REQUEST, spec, f"run pid {owner.pid}"))


def renamed(event: ev.Command, name: str) -> ev.Command:
    """Return the command with another operation; a run's owner has its name."""
    if isinstance(event, ev.Run):
        owner = event.owner.model_copy(update={"id": name})
        asked = None if event.asked is None else replace(event.asked, operation=name)
        event = replace(event, owner=owner, asked=asked)
    return replace(event, operation=name)


def run_planned(snapshot: Snapshot) -> ev.Planned:
    """Return what is found out of the run that waits, when nothing speaks against it."""
    assert snapshot.pending is not None
    return planned(snapshot, snapshot.pending.waiting[0])


WIDE_A, COLD_A = replace(WIDE, operation="a"), replace(COLD, operation="a")
PATCH_A = replace(PATCH, operation="a")
MADE = (1, CHANGE, receipt(), "me", AT)
READY, _ = play(EMPTY, *up(), ev.Healthy(1, FACTS, AT))
RUN_ASKED, _ = play(EMPTY, run(OWNER))
RUN_LOADING, _ = play(RUN_ASKED, run_planned(RUN_ASKED), ev.Spawned(1, process(1), SPEC))
OWNED, _ = play(RUN_LOADING, ev.Healthy(1, FACTS, AT))
LINGERING, _ = play(OWNED, ev.Left("run"))
RELAUNCHED, _ = play(READY, COLD_A, planned(READY, COLD_A), WRITTEN_OUT, ev.Exited(1, RECORD, 0.5))
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
    "writing": play(READY, ev.Stop("s"))[0],
    "writing to restart": play(READY, ev.Restart("s"))[0],
    "bringing back": play(EMPTY, *up(), ev.Healthy(1, QUIET, AT))[0],
    "stopping": play(READY, ev.Stop("s"), WRITTEN_OUT)[0],
    "stopping amid a change": play(READY, ev.Reconfigure("r", CHANGE), ev.Stop("s"), WRITTEN_OUT)[
        0
    ],
    "stopping amid a reload": play(READY, ev.ConfigRead("r", CONFIG), ev.Stop("s"), WRITTEN_OUT)[0],
    "stopping while spawning": play(EMPTY, ev.Up("up", REQUEST), ev.Stop("s"))[0],
    "restarting": play(READY, ev.Restart("s"), WRITTEN_OUT)[0],
    "replacing": play(READY, ev.Wedged(1, WEDGED))[0],
    "load stalled": play(play(EMPTY, *up())[0], ev.Tick(), now=NOW + 61)[0],
    "going down": play(READY, ev.Down("d"), WRITTEN_OUT)[0],
    "planning": play(READY, WIDE_A)[0],
    "applying": play(READY, WIDE_A, planned(READY, WIDE_A))[0],
    "apply waits": play(READY, ev.Reconfigure("r", CHANGE), WIDE_A)[0],
    "rebasing": play(READY, ev.Reconfigure("r", CHANGE), PATCH_A, ev.Reconfigured(*MADE))[0],
    "stopping amid an apply": play(READY, WIDE_A, planned(READY, WIDE_A), ev.Stop("s"))[0],
    "writing to relaunch": play(READY, COLD_A, planned(READY, COLD_A))[0],
    "relaunching": play(READY, COLD_A, planned(READY, COLD_A), WRITTEN_OUT)[0],
    "relaunched": RELAUNCHED,
    "crashed": play(READY, ev.Exited(1, RECORD, 0.5))[0],
    "lacking files": play(EMPTY, ev.Up("up", REQUEST), ev.SpawnFailed(1, MISSING, 0.5))[0],
    "failed": play(EMPTY, *up(), ev.Exited(1, RECORD, 0.5))[0],
    "run asked": RUN_ASKED,
    "run loading": RUN_LOADING,
    "owned": OWNED,
    "lingering": LINGERING,
}
EVENTS: list[ev.Event] = [
    ev.Up("o", REQUEST),
    ev.Up("o", OTHER),
    ev.Start("o"),
    ev.Stop("o"),
    ev.Restart("o"),
    ev.Restart("o", accept_loss=True),
    ev.Down("o"),
    ev.Reconfigure("o", CHANGE),
    ev.Reload("o"),
    WIDE,
    COLD,
    PATCH,
    ev.Rebased("a", WIDE.request, WIDE.spec),
    ev.Rebased("a", WIDE.request, PROBLEM),
    planned(READY, WIDE_A),
    planned(READY, COLD_A),
    planned(EMPTY, COLD_A),
    ev.Planned("a", PROBLEM),
    ev.Page("o", OperationKind.PAGE_OUT, "fox", 1),
    ev.PageFile("o", OperationKind.PAGE_SPILL, "b", page="fox"),
    run(NEXT_OWNER),
    ev.Run("again", NEXT_OWNER.model_copy(update={"id": "again"}), None, "i1"),
    ev.Left("run"),
    ev.Left("next"),
    ev.Pressure(),
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
    ev.Found(process(1), stopping=After.REST),
    ev.Found(process(1), stopping=After.START),
    ev.Found(process(1), stopping=After.REPLACE),
    ev.FoundDead(process(1), RECORD),
    ev.HandOver(),
    ev.Tick(),
]
EVENTS += [
    event
    for generation in (0, 1, 2)
    for event in (
        ev.Spawned(generation, process(generation), SPEC),
        ev.SpawnFailed(generation, PROBLEM, 0.5),
        ev.SpawnFailed(generation, MISSING, 0.5),
        ev.LookedForFiles(generation, there=True),
        ev.LookedForFiles(generation, there=False),
        ev.Moved(generation),
        ev.Listens(generation),
        ev.Healthy(generation, FACTS, AT),
        ev.Healthy(generation, QUIET, AT),
        ev.CarryMoved(generation, "writing 1 of 2 conversations", ONE_LOST),
        ev.CarriedOut(generation, ALL_KEPT),
        ev.CarriedOut(generation, ONE_LOST),
        ev.CarriedOut(generation, CarryReport(problem=PROBLEM)),
        ev.CarriedIn(generation, ALL_BACK, FACTS, AT),
        ev.HolderLost(generation),
        ev.HolderLooked(generation, None),
        ev.HolderLooked(generation, PROBLEM),
        ev.Observed(generation, FACTS, NOW, AT),
        ev.Wedged(generation, WEDGED),
        ev.Exited(generation, RECORD, 0.5),
        ev.Reconfigured(generation, CHANGE, receipt(), "me", AT),
        ev.ReconfigureFailed(generation, PROBLEM),
    )
]
CHANGED = ev.Reconfigured(1, CHANGE, receipt(), "me", AT)


def observed(now: float = NOW, wake_s: float | None = None, **facts: object) -> ev.Observed:
    """Return a look at the engine, which says these facts otherwise than `FACTS`."""
    return ev.Observed(1, replace(FACTS, **facts), now, AT, wake_s)  # type: ignore[arg-type]


def again(crashed: Snapshot, now: float) -> tuple[Snapshot, ev.Spawn]:
    """Let the retry come due; return the engine that is ready then, and how it was started."""
    assert crashed.deadline is not None
    snapshot, effects = reduce(crashed, ev.Tick(), max(now, crashed.deadline))
    (spawn,) = (effect for effect in effects if isinstance(effect, ev.Spawn))
    here = spawn.generation
    events = ev.Spawned(here, process(here)), ev.Healthy(here, FACTS, AT)
    return play(snapshot, *events, now=now)[0], spawn


def changed(snapshot: Snapshot, n_ctx: int, now: float) -> Snapshot:
    """Change the geometry live."""
    here = snapshot.generation
    change = ReconfigureRequest(n_ctx=n_ctx, n_seq=4)
    done = ev.Reconfigured(here, change, receipt(), "me", AT)
    return play(snapshot, ev.Reconfigure("r", change), done, now=now)[0]
