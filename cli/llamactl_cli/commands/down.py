"""`llamactl down`: engine and daemon gone, whatever was left of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llamactl_cli import waiting
from llamactl_cli.connect import connect
from llamactl_cli.options import Timeout
from llamactl_cli.views import LifecycleView, end

if TYPE_CHECKING:
    from llamactl_supervisor.client import Client
    from llamactl_supervisor.models import LifecycleResult

    from llamactl_cli.output import Output


def down(
    ctx: typer.Context,
    now: Annotated[
        bool,
        typer.Option(
            "--now",
            help="Cut requests under way; what they hold is kept. Once more, of an engine that is "
            "being stopped: without what is not in files yet.",
        ),
    ] = False,
    timeout: Timeout = None,
) -> None:
    """Stop the engine, then the daemon.

    Returns when both are gone. Where no daemon runs this is done already (exit 0), unless an
    engine outlived its daemon: that one is adopted and stopped. Exit 1: both are gone, and so is a
    conversation that nobody gave up. Exit 5: an engine that may be ours and is not proven it lives
    on.
    """
    from llamactl_supervisor import locks, remains
    from llamactl_supervisor.errors import Code, DaemonUnreachableError, error
    from llamactl_supervisor.models import LifecycleOutcome, LifecycleResult
    from llamactl_supervisor.spawn import spawn_daemon

    output: Output = ctx.obj
    with connect(output) as client:
        try:
            result = _stop(client, output, timeout, now=now)
        except DaemonUnreachableError:
            if locks.daemon_lives(client.paths):
                raise
            if pids := remains.engine_pids(client.paths):
                output.say(f"no daemon, but engine {pids[0]} still runs: a new daemon will stop it")
                spawn_daemon(client.paths)
                result = _stop(client, output, timeout, now=now)
            elif unproven := remains.unrecorded(client.paths, set()):
                pid = unproven[0].pid
                raise error(
                    Code.ENGINE_UNPROVEN,
                    f"no daemon runs, but an engine that is not provably ours does, with pid {pid}:"
                    " left alone",
                    hint=f"see `llamactl orphans`; end it yourself if it is not needed: kill {pid}",
                    details={"pids": [each.pid for each in unproven]},
                ) from None
            else:
                result = LifecycleResult(outcome=LifecycleOutcome.ALREADY_STOPPED)
    output.emit(LifecycleView(result))
    end(result)


def _stop(client: Client, output: Output, timeout_s: float | None, *, now: bool) -> LifecycleResult:
    from llamactl_supervisor.models import LifecycleOutcome, LifecycleResult

    try:
        with output.activity("stopping engine and daemon") as tell:
            ended = client.wait_down(now=now, timeout_s=timeout_s, on_progress=tell)
    except KeyboardInterrupt:
        output.say("the daemon goes on with it; `llamactl down --now` cuts it short")
        raise
    if ended is None:
        return LifecycleResult(outcome=LifecycleOutcome.STOPPED)
    waiting.warn(ended, output)
    assert isinstance(ended.result, LifecycleResult)
    return ended.result
