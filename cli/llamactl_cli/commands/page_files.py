"""`llamactl pages spill`, `save` and `restore`: conversations in files, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamactl_cli import text, waiting
from llamactl_cli.connect import connect
from llamactl_cli.options import FileName, PageName, Slot, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamactl_supervisor.client import Client
    from llamactl_supervisor.models import FileReceipt, Operation

    from llamactl_cli.output import Output


@dataclass(frozen=True)
class FileView:
    """What a verb with files came to; `done` says what was written, or where it went."""

    done: str
    receipt: FileReceipt

    def text(self) -> str:
        """Return what was written or read, and what a request will reuse of it."""
        receipt, reusable = self.receipt, self.receipt.n_reusable
        checkpoints = text.count(receipt.n_checkpoints, "checkpoint")
        tokens = text.count(receipt.n_tokens, "token")
        left = None if receipt.dropped is None else "dropped" if receipt.dropped else "not dropped"
        rows = [
            ("file", f"{receipt.filename}, {self.done}"),
            ("page", left),
            ("held", f"{tokens}, {text.size(receipt.n_bytes)}, {checkpoints}"),
            ("written", None if receipt.n_written is None else text.size(receipt.n_written)),
            ("read", None if receipt.n_read is None else text.size(receipt.n_read)),
            ("reusable", None if reusable is None else text.count(reusable, "token")),
            ("took", None if receipt.took_ms is None else f"{receipt.took_ms:.1f} ms"),
        ]
        return text.table(rows)

    def data(self) -> dict[str, Any]:
        """Return the receipt as the engine gave it."""
        return self.receipt.model_dump(mode="json", exclude_none=True)


def spill(
    ctx: typer.Context,
    name: PageName,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="FILENAME", help="The files' name; without it, NAME."),
    ] = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="Free the page once it is in its files.")
    ] = False,
    timeout: Timeout = None,
) -> None:
    """Write page NAME to files, beside decoding.

    Files of that name are replaced. Wakes a sleeping engine.
    """
    output: Output = ctx.obj
    receipt = _run(
        output,
        lambda client: client.page_spill(name, filename=to, drop=drop),
        f"of page {name}",
        timeout,
    )
    if drop and receipt.dropped is False:
        output.say(f"page {name} was not dropped: it was taken or replaced meanwhile")


def save(ctx: typer.Context, slot: Slot, filename: FileName, timeout: Timeout = None) -> None:
    """Write the conversation in SLOT to files; it stays in the slot.

    Files of that name are replaced. Waits while the slot is busy; wakes a sleeping engine.
    """
    _run(ctx.obj, lambda client: client.page_save(slot, filename), f"of slot {slot}", timeout)


def restore(ctx: typer.Context, filename: FileName, slot: Slot, timeout: Timeout = None) -> None:
    """Read files into SLOT, in place of what the slot holds.

    The files stay. Waits while the slot is busy; wakes a sleeping engine.
    """
    output: Output = ctx.obj
    done = f"into slot {slot}"
    receipt = _run(output, lambda client: client.page_restore(filename, slot), done, timeout)
    for part in receipt.lost or ():
        output.say(f"lost {part.file}: {part.why}; what it is good for begins anew")


def _run(
    output: Output,
    call: Callable[[Client], Operation],
    done: str,
    timeout_s: float | None,
) -> FileReceipt:
    from llamactl_supervisor.models import FileReceipt

    with connect(output) as client:
        doing, operation = "asking the engine", call(client)
        receipt = waiting.follow(
            client, operation, output, FileReceipt, doing=doing, timeout_s=timeout_s
        )
    output.emit(FileView(done, receipt))
    return receipt
