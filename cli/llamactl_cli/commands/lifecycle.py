"""`llamactl start`, `stop` and `restart`: the engine alone, the daemon stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from llamactl_cli import waiting
from llamactl_cli.connect import connect
from llamactl_cli.options import Timeout
from llamactl_cli.views import LifecycleView

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamactl_supervisor.client import ControlClient
    from llamactl_supervisor.models import Operation

    from llamactl_cli.output import Output


def start(ctx: typer.Context, timeout: Timeout = None) -> None:
    """Start the engine that was last asked for.

    Returns when it is ready. A geometry that was set live is kept.
    """
    _run(ctx.obj, lambda client: client.start(), "starting the engine", timeout)


def stop(ctx: typer.Context, timeout: Timeout = None) -> None:
    """Stop the engine; the daemon stays.

    `llamactl start` runs the same engine again.
    """
    _run(ctx.obj, lambda client: client.stop(), "stopping the engine", timeout)


def restart(ctx: typer.Context, timeout: Timeout = None) -> None:
    """Stop the engine and load it again.

    Returns when it is ready. A geometry that was set live is kept.
    """
    _run(ctx.obj, lambda client: client.restart(), "restarting the engine", timeout)


def _run(
    output: Output,
    call: Callable[[ControlClient], Operation],
    doing: str,
    timeout_s: float | None,
) -> None:
    from llamactl_supervisor.models import LifecycleResult

    with connect(output) as client:
        result = waiting.follow(
            client, call(client), output, LifecycleResult, doing=doing, timeout_s=timeout_s
        )
    output.emit(LifecycleView(result))
