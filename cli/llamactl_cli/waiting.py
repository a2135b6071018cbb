"""Following an operation of the daemon to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llamactl_supervisor.client import ControlClient
    from llamactl_supervisor.models import (
        FileReceipt,
        LifecycleResult,
        Operation,
        PageReceipt,
        Receipt,
        ReloadResult,
    )

    from llamactl_cli.output import Output

    Result = TypeVar("Result", LifecycleResult, ReloadResult, Receipt, PageReceipt, FileReceipt)


def follow(
    client: ControlClient,
    operation: Operation,
    output: Output,
    shape: type[Result],
    *,
    doing: str,
    timeout_s: float | None = None,
) -> Result:
    """Return the operation's result, or raise its error or `timed_out`; show that it goes on."""
    try:
        with output.activity(doing) as tell:
            ended = client.wait_operation(operation, timeout_s=timeout_s, on_progress=tell)
    except KeyboardInterrupt:
        output.say("the daemon goes on with it; `llamactl status` shows how far it is")
        raise
    assert isinstance(ended.result, shape)
    return ended.result
