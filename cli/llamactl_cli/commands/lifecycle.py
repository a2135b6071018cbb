"""`llamactl start`, `stop` and `restart`: the engine alone, the daemon stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llamactl_cli import waiting
from llamactl_cli.connect import connect
from llamactl_cli.options import Timeout
from llamactl_cli.views import LifecycleView, end

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamactl_supervisor.client import Client
    from llamactl_supervisor.models import LifecycleResult, Operation

    from llamactl_cli.output import Output


def start(ctx: typer.Context, timeout: Timeout = None) -> None:
    """Start the engine that was last asked for.

    Returns when it is ready. A geometry that was set live is kept.
    """
    _run(ctx.obj, lambda client: client.start(), "starting the engine", timeout)


def stop(
    ctx: typer.Context,
    now: Annotated[
        bool,
        typer.Option(
            "--now",
            help="Even if a `llamactl run` has the engine; it ends too. Cut requests under way; "
            "what they hold is kept. Once more, of an engine that is being stopped: without what "
            "is not in files yet.",
        ),
    ] = False,
    timeout: Timeout = None,
) -> None:
    """Stop the engine; the daemon stays.

    Its conversations are kept in files. `llamactl start` runs the same engine again, and brings
    them back. One that lingers for the next `llamactl run` is stopped at once; one that has an
    owner only with --now, else that is refused (exit 5). While it is being stopped, `stop --now`
    ends the wait for requests, and another the wait for conversations: what is in no file by then
    is lost, and named. A conversation that is lost otherwise makes it exit 1; the engine is stopped
    all the same.
    """
    result = _run(ctx.obj, lambda client: client.stop(now=now), "stopping the engine", timeout)
    end(result)


def restart(
    ctx: typer.Context,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Even if a conversation cannot be kept."),
    ] = False,
    timeout: Timeout = None,
) -> None:
    """Stop the engine and load it again.

    Returns when it is ready. A geometry that was set live is kept, and so is every conversation:
    where one cannot be, the engine runs on as it is (5). One that is lost all the same, since the
    engine dies meanwhile, is named (1).
    """

    def call(client: Client) -> Operation:
        return client.restart(accept_loss=accept_loss)

    result = _run(ctx.obj, call, "restarting the engine", timeout)
    end(result, accept_loss=accept_loss)


def _run(
    output: Output,
    call: Callable[[Client], Operation],
    doing: str,
    timeout_s: float | None,
) -> LifecycleResult:
    from llamactl_supervisor.models import LifecycleResult

    with connect(output) as client:
        result = waiting.follow(
            client, call(client), output, LifecycleResult, doing=doing, timeout_s=timeout_s
        )
    output.emit(LifecycleView(result))
    return result
