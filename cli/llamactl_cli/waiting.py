"""Following an operation of the daemon to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llamactl_supervisor.client import Client
    from llamactl_supervisor.models import (
        ApplyResult,
        FileReceipt,
        LifecycleResult,
        Operation,
        PageReceipt,
        Receipt,
        ReloadResult,
    )

    from llamactl_cli.output import Output

    Result = TypeVar(
        "Result",
        ApplyResult,
        LifecycleResult,
        ReloadResult,
        Receipt,
        PageReceipt,
        FileReceipt,
    )


def follow(
    client: Client,
    operation: Operation,
    output: Output,
    shape: type[Result],
    *,
    doing: str,
    timeout_s: float | None = None,
) -> Result:
    """Return the operation's result, or raise its error or `timed_out`; show that it goes on."""
    ended = _wait(client, operation, output, doing, timeout_s)
    warn(ended, output)
    assert isinstance(ended.result, shape)
    return ended.result


def planned(
    client: Client, operation: Operation, output: Output, *, timeout_s: float | None
) -> Operation:
    """Return an apply when it is known what it comes to, or at its end; its errors are raised."""
    return _wait(client, operation, output, "making the plan", timeout_s, planned=True)


def _wait(
    client: Client,
    operation: Operation,
    output: Output,
    doing: str,
    timeout_s: float | None,
    *,
    planned: bool = False,
) -> Operation:
    try:
        with output.activity(doing) as tell:
            return client.wait_operation(
                operation, timeout_s=timeout_s, on_progress=tell, planned=planned
            )
    except KeyboardInterrupt:
        cut = "" if operation.kind != "stop" else "; `llamactl stop --now` cuts it short"
        output.say(f"the daemon goes on with it; `llamactl status` shows how far it is{cut}")
        raise


def warn(ended: Operation, output: Output) -> None:
    """Say what else there is to an operation that succeeded."""
    if ended.warning is not None:
        output.say(f"done, but not saved: {ended.warning.message}")
