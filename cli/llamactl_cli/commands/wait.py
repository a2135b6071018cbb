"""`llamactl wait`: block until the daemon is idle, or until the engine is ready."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from llamactl_supervisor.errors import Code, DaemonUnreachableError, error

from llamactl_cli import text, without_daemon
from llamactl_cli.connect import connect
from llamactl_cli.options import timeout as timeout_s

if TYPE_CHECKING:
    from llamactl_supervisor.client import Client
    from llamactl_supervisor.models import Operation, Status

    from llamactl_cli.output import Output

TIMEOUT_S = 300.0
SETTLED = ("ready", "stopped", "failed")
"""States that stay until somebody asks for something or the engine ends."""
POLL_S = 0.1
LONG_POLL_S = 20.0
ANSWER_S = 1.0
"""How long the daemon may take for an answer at the end of the time."""


@dataclass(frozen=True)
class WaitView:
    """How it ended."""

    state: str
    waited_s: float

    def text(self) -> str:
        """Return one line."""
        return f"engine {self.state}, waited {text.seconds(self.waited_s)}"

    def data(self) -> dict[str, Any]:
        """Return the same."""
        return {"state": self.state, "waited_s": round(self.waited_s, 3)}


def wait(
    ctx: typer.Context,
    ready: Annotated[
        bool, typer.Option("--ready", help="Until the engine is ready, not only until idle.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", parser=timeout_s, metavar="SECONDS", help="How long to wait (exit 6)."
        ),
    ] = TIMEOUT_S,
) -> None:
    """Wait until the daemon is idle, or the engine ready.

    Idle means that no start, stop or reconfigure is in progress, and none is due after a crash:
    the engine is ready, stopped or given up. With --ready a daemon or an
    engine that is not there yet is waited for as well; an engine that was given up is an error
    at once.
    """
    output: Output = ctx.obj
    began = time.monotonic()
    with connect(output) as client, output.activity("waiting") as tell:
        while True:
            left_s = began + timeout - time.monotonic()
            status, state = _status(client, or_none=ready, within_s=left_s)
            tell(state)
            if status is not None and _reached(status, ready=ready):
                break
            if left_s <= 0:
                raise error(Code.TIMED_OUT, f"{state} after {timeout:g} s")
            _pause(client, None if status is None else status.operation, left_s)
    output.emit(WaitView(status.state.value, time.monotonic() - began))


def _status(client: Client, *, or_none: bool, within_s: float) -> tuple[Status | None, str]:
    """Return the status and what it comes to in words; None where there is none yet.

    A daemon that lives and does not answer may do so later.
    """
    try:
        status = client.status(timeout_s=min(LONG_POLL_S, max(ANSWER_S, within_s)))
    except DaemonUnreachableError as exc:
        if "pid" in exc.details:
            return None, exc.message
        if or_none:
            found = without_daemon.outlived(client.paths)
            return None, "no daemon runs" if found is None else f"no daemon runs; {found}"
        raise
    return status, f"the engine is {status.state}"


def _reached(status: Status, *, ready: bool) -> bool:
    from llamactl_supervisor.models import PAGE_KINDS

    if not ready:
        busy = status.operation is not None and status.operation.kind not in PAGE_KINDS
        return status.state in SETTLED and not busy
    if status.state == "failed" and status.operation is None:
        problem = status.problem
        why = "the engine was given up" if problem is None else problem.message
        raise error(Code.ENGINE_EXITED, why, hint="see `llamactl logs`, then `llamactl start`")
    return status.state == "ready"


def _pause(client: Client, operation: Operation | None, left_s: float) -> None:
    """Let a moment pass; where an operation runs, until its end."""
    if operation is None:
        time.sleep(min(POLL_S, left_s))
        return
    with contextlib.suppress(DaemonUnreachableError):  # the next look will tell
        client.operation(operation.id, wait_s=min(LONG_POLL_S, left_s), answer_s=ANSWER_S)
