"""What of a snapshot outlives the daemon, and the snapshot that a new daemon begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from llamactl_supervisor import apply
from llamactl_supervisor import events as ev
from llamactl_supervisor.launch import instance_id
from llamactl_supervisor.models import EngineState
from llamactl_supervisor.snapshot import IDLE, Snapshot, Unended, is_restart
from llamactl_supervisor.store import Accepted, Saved

if TYPE_CHECKING:
    from llamactl_supervisor.settings import Settings


def snapshot_of(saved: Saved, settings: Settings, now: float) -> Snapshot:
    """Return what is known before it was looked what of it is still there."""
    return Snapshot(
        seed=uuid4(),
        settings=settings,
        intent=saved.intent,
        generation=saved.generation,
        desired=saved.desired,
        running=saved.running,
        running_spec=saved.running_spec,
        override=saved.override,
        baseline=saved.baseline,
        facts=ev.EngineFacts(last_reconfigure=saved.last_reconfigure),
        loads_recorded=saved.loads_recorded,
        last_good=saved.last_good,
        change_by=saved.change_by,
        last_exit=saved.last_exit,
        crashes=saved.crashes,
        relapses=saved.relapses,
        state=EngineState.STOPPED if saved.failed is None else EngineState.FAILED,
        problem=saved.failed,
        cause=saved.cause,
        load_began=saved.load_began,
        trial_ends=now + settings.override_trial_s if saved.on_trial else None,
        lost=tuple(
            Unended(ev.Apply(each.operation, each.request, each.spec, each.by), each.is_sent)
            for each in saved.applies
        ),
    )


def saved_of(snapshot: Snapshot, *, change_by: str | None, load_by: str | None) -> Saved:
    """Return what is to be saved.

    `change_by` asked for the change of the geometry that is under way, `load_by` for the load.
    """
    process, name = snapshot.process, None
    if snapshot.state not in IDLE:
        spawned = instance_id(snapshot.seed, snapshot.generation)
        name = spawned if process is None else process.instance_id
    gives_up = snapshot.settings.on_failed == "stay"  # else its manager decides what is next
    failed = snapshot.problem if snapshot.state is EngineState.FAILED and gives_up else None
    loading = name is not None and not snapshot.loads_recorded
    # Its TERM is decided: whoever comes next does not begin to stop it anew.
    ending = snapshot.state is EngineState.STOPPING and snapshot.carry is None
    to_come = ending and is_restart(snapshot)
    last = snapshot.last_exit  # without its lines: there may be secrets in them
    return Saved(
        intent=snapshot.intent,
        generation=snapshot.generation,
        desired=snapshot.desired,
        running=snapshot.running,
        running_spec=snapshot.running_spec,
        override=snapshot.override,
        baseline=snapshot.baseline,
        instance_id=name,
        process=process,
        loads_recorded=snapshot.loads_recorded,
        last_reconfigure=snapshot.facts.last_reconfigure,
        on_trial=snapshot.trial_ends is not None,
        last_good=snapshot.last_good,
        unproven=snapshot.unproven,
        crashes=snapshot.crashes,
        relapses=snapshot.relapses,
        failed=failed,
        cause=snapshot.cause,
        stopping=snapshot.after if ending else None,
        last_exit=None if last is None else last.model_copy(update={"last_lines": ()}),
        change_by=change_by,
        load_by=load_by if loading or to_come else None,
        load_began=snapshot.load_began if loading else 0.0,
        applies=tuple(_accepted(each) for each in apply.unended(snapshot)),
    )


def _accepted(unended: Unended) -> Accepted:
    command = unended.command
    return Accepted(
        operation=command.operation,
        request=command.request,
        spec=command.spec,
        by=command.by,
        is_sent=unended.is_sent,
    )
