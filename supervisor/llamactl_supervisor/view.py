"""What the daemon shows: its snapshot as the `Status` and the `RunningConfig` of the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl_supervisor.models import (
    DEFAULT_HOST,
    EngineState,
    EngineStatus,
    RunningConfig,
    Status,
)
from llamactl_supervisor.reload import in_force, unapplied
from llamactl_supervisor.snapshot import SERVING

if TYPE_CHECKING:
    from pathlib import Path

    from llamactl_supervisor.config import Loaded
    from llamactl_supervisor.models import (
        ConfigStatus,
        DaemonStatus,
        LostApply,
        Operation,
        Problem,
        Stranger,
    )
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.snapshot import Snapshot

PINS = ("env ", "flag ")
"""How the sources begin that stay as they are for a daemon's life."""
EVERY_ADDRESS = "0.0.0.0"
"""To be listened on; a client needs one that it can reach."""


def status(
    snapshot: Snapshot,
    now: float,
    paths: Paths,
    *,
    daemon: DaemonStatus,
    config: ConfigStatus | None,
    operation: Operation | None,
    strangers: tuple[Stranger, ...],
    weight_loads: int,
    loads_avoided: int,
    crash_record: Path | None,
    unsaved: Problem | None,
    ledger_lost: int,
    in_files: tuple[int, int],
    lost: tuple[LostApply, ...],
    log_dropped: int = 0,
) -> Status:
    """Return the status; `now` is on the daemon's clock."""
    left_s = None if snapshot.deadline is None else max(0.0, snapshot.deadline - now)
    return Status(
        state=snapshot.state,
        intent=snapshot.intent,
        generation=snapshot.generation,
        crashes=snapshot.crashes,
        retry_in_s=left_s if snapshot.state is EngineState.CRASHED else None,
        forgotten_in_s=left_s if snapshot.state in SERVING and snapshot.crashes else None,
        daemon=daemon,
        desired=snapshot.desired,
        override=snapshot.override,
        unapplied=unapplied(snapshot),
        config=config,
        engine=_engine(snapshot, paths, log_dropped),
        operation=operation,
        problem=snapshot.problem,
        last_exit=snapshot.last_exit,
        strangers=strangers,
        weight_loads=weight_loads,
        loads_avoided=loads_avoided,
        crash_record=str(crash_record) if crash_record and snapshot.crashes else None,
        dropped_override=snapshot.dropped,
        unsaved=unsaved,
        ledger_lost=ledger_lost,
        lost=lost,
        owner=snapshot.owner,
        lingers_s=_lingers_s(snapshot, now),
        in_files=in_files[0],
        in_files_bytes=in_files[1],
        carrying=None if snapshot.carry is None else snapshot.carry.progress,
    )


def _lingers_s(snapshot: Snapshot, now: float) -> float | None:
    lingering = snapshot.lingering
    if lingering is None or snapshot.owner is not None:
        return None
    return max(0.0, lingering.until - now)


def config(snapshot: Snapshot, loaded: Loaded, pid: int) -> RunningConfig:
    """Return the configuration that was `loaded` at the daemon's start, as it is by now."""
    sources = {key: value.source for key, value in loaded.values.items()}
    pinned = {key: source for key, source in sources.items() if source.startswith(PINS)}
    return RunningConfig(
        pid=pid,
        file=None if loaded.file is None else str(loaded.file),
        values={
            key: value.model_copy(update={"pinned": pinned.get(key)})
            for key, value in in_force(snapshot).items()
        },
    )


def _engine(snapshot: Snapshot, paths: Paths, log_dropped: int) -> EngineStatus | None:
    process, running = snapshot.process, snapshot.running
    if process is None or running is None:
        return None
    socket = paths.engine_dir(process.instance_id) / "engine.sock"
    host = DEFAULT_HOST if running.spec.host == EVERY_ADDRESS else running.spec.host
    return EngineStatus(
        pid=process.engine.pid,
        holder_pid=None if process.holder is None else process.holder.pid,
        instance_id=process.instance_id,
        url=_url(snapshot, str(socket), f"http://{host}:{running.spec.port}"),
        socket=str(socket),
        adopted=process.adopted,
        geometry=snapshot.facts.geometry,
        n_weight_loads=snapshot.facts.n_weight_loads,
        last_reconfigure=snapshot.facts.last_reconfigure,
        is_sleeping=snapshot.facts.work.is_sleeping,
        log_dropped_bytes=log_dropped,
    )


def _url(snapshot: Snapshot, socket: str, public: str) -> str:
    """Return where clients find the engine: one of a run by its owner's port, while he is there."""
    if not snapshot.is_run:
        return public
    owner = snapshot.owner
    return f"unix:{socket}" if owner is None else f"http://{owner.host}:{owner.port}"
