"""What the daemon shows: its snapshot as the `Status` of the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl_supervisor.models import DEFAULT_HOST, EngineState, EngineStatus, Status
from llamactl_supervisor.reload import unapplied

if TYPE_CHECKING:
    from pathlib import Path

    from llamactl_supervisor.models import DaemonStatus, Operation, Stranger
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.snapshot import Snapshot

EVERY_ADDRESS = "0.0.0.0"
"""To be listened on; a client needs one that it can reach."""


def status(
    snapshot: Snapshot,
    now: float,
    paths: Paths,
    *,
    daemon: DaemonStatus,
    operation: Operation | None,
    strangers: tuple[Stranger, ...],
    weight_loads: int,
    loads_avoided: int,
    crash_record: Path | None,
) -> Status:
    """Return the status; `now` is on the monotonic clock."""
    retry_in_s = None
    if snapshot.state is EngineState.CRASHED and snapshot.deadline is not None:
        retry_in_s = max(0.0, snapshot.deadline - now)
    return Status(
        state=snapshot.state,
        intent=snapshot.intent,
        generation=snapshot.generation,
        crashes=snapshot.crashes,
        retry_in_s=retry_in_s,
        daemon=daemon,
        desired=snapshot.desired,
        override=snapshot.override,
        unapplied=unapplied(snapshot),
        engine=_engine(snapshot, paths),
        operation=operation,
        problem=snapshot.problem,
        last_exit=snapshot.last_exit,
        strangers=strangers,
        weight_loads=weight_loads,
        loads_avoided=loads_avoided,
        crash_record=None if crash_record is None else str(crash_record),
        dropped_override=snapshot.dropped,
    )


def _engine(snapshot: Snapshot, paths: Paths) -> EngineStatus | None:
    process, running = snapshot.process, snapshot.running
    if process is None or running is None:
        return None
    host = DEFAULT_HOST if running.spec.host == EVERY_ADDRESS else running.spec.host
    return EngineStatus(
        pid=process.engine.pid,
        holder_pid=None if process.holder is None else process.holder.pid,
        instance_id=process.instance_id,
        url=f"http://{host}:{running.spec.port}",
        socket=str(paths.engine_dir(process.instance_id) / "engine.sock"),
        adopted=process.adopted,
        geometry=snapshot.facts.geometry,
        n_weight_loads=snapshot.facts.n_weight_loads,
        last_reconfigure=snapshot.facts.last_reconfigure,
        is_sleeping=snapshot.facts.work.is_sleeping,
    )
