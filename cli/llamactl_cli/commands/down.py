"""`llamactl down`: engine and daemon gone, whatever was left of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from llamactl_cli import remains
from llamactl_cli.connect import connect
from llamactl_cli.options import Timeout
from llamactl_cli.views import LifecycleView

if TYPE_CHECKING:
    from llamactl_supervisor.client import ControlClient
    from llamactl_supervisor.models import LifecycleResult

    from llamactl_cli.output import Output


def down(ctx: typer.Context, timeout: Timeout = None) -> None:
    """Stop the engine, then the daemon.

    Returns when both are gone. Where no daemon runs this is done already (exit 0), unless an
    engine outlived its daemon: that one is adopted and stopped.
    """
    from llamactl_supervisor.client import spawn_daemon
    from llamactl_supervisor.errors import DaemonUnreachableError
    from llamactl_supervisor.models import LifecycleOutcome, LifecycleResult

    output: Output = ctx.obj
    with connect(output) as client:
        try:
            result = _stop(client, output, timeout)
        except DaemonUnreachableError:
            if remains.daemon_holds_lock(client.paths):
                raise
            if pids := remains.engine_pids(client.paths):
                output.say(f"no daemon, but engine {pids[0]} still runs: a new daemon will stop it")
                spawn_daemon(client.paths)
                result = _stop(client, output, timeout)
            else:
                result = LifecycleResult(outcome=LifecycleOutcome.ALREADY_STOPPED)
    output.emit(LifecycleView(result))


def _stop(client: ControlClient, output: Output, timeout_s: float | None) -> LifecycleResult:
    with output.activity("stopping engine and daemon"):
        return client.wait_down(timeout_s=timeout_s)
