"""`llamactl pages ls`, `out`, `in` and `drop`: conversations in host memory, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from llamactl_cli import text, waiting
from llamactl_cli.connect import connect
from llamactl_cli.options import READ_TIMEOUT_S, PageName, ReadTimeout, Slot, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamactl_supervisor.client import Client
    from llamactl_supervisor.models import Operation, Page, PageReceipt, Pages

    from llamactl_cli.output import Output


@dataclass(frozen=True)
class PagesView:
    """What is kept outside the slots."""

    pages: Pages

    def text(self) -> str:
        """Return the table, or that there is nothing; then what is in files alone, and why."""
        if not self.pages.left:
            return self._pages()
        rows = [
            (*(each.file, each.what, str(each.n_tokens)), text.size(each.n_bytes), each.reason)
            for each in self.pages.left
        ]
        heads = ("left in files", "was", "tokens", "bytes", "reason")
        table = text.columns(heads, [tuple(text.printable(str(e)) for e in row) for row in rows])
        return f"{self._pages()}\n\n{table}"

    def _pages(self) -> str:
        if not self.pages.pages:
            return "no pages"
        rows = [
            (
                *(page.name, str(page.n_tokens), text.size(page.n_bytes)),
                *(str(page.n_checkpoints), text.seconds(page.age_s), _state(page)),
            )
            for page in self.pages.pages
        ]
        return text.columns(("name", "tokens", "bytes", "checkpoints", "age", "state"), rows)

    def data(self) -> dict[str, Any]:
        """Return the pages as the engine gave them."""
        return self.pages.model_dump(mode="json", exclude_unset=True)


@dataclass(frozen=True)
class PageView:
    """What a page verb came to; `done` says where the page went."""

    done: str
    receipt: PageReceipt

    def text(self) -> str:
        """Return what was moved or freed, and what a request will reuse of it."""
        receipt, reusable = self.receipt, self.receipt.n_reusable
        checkpoints = text.count(receipt.n_checkpoints, "checkpoint")
        tokens = text.count(receipt.n_tokens, "token")
        rows = [
            ("page", f"{receipt.page}, {self.done}"),
            ("held", f"{tokens}, {text.size(receipt.n_bytes)}, {checkpoints}"),
            ("reusable", None if reusable is None else text.count(reusable, "token")),
            ("took", f"{receipt.ms:.1f} ms"),
        ]
        return text.table(rows)

    def data(self) -> dict[str, Any]:
        """Return the receipt as the engine gave it."""
        return self.receipt.model_dump(mode="json", exclude_none=True)


def _state(page: Page) -> str:
    if page.running:
        return "parked, its request waits"
    return "parked" if page.parked else "paged out"


def ls(ctx: typer.Context, timeout: ReadTimeout = READ_TIMEOUT_S) -> None:
    """List the pages, parked conversations among them, and what files hold beside them.

    That is what the engine did not take in its start; `drop` removes it by the name of its file.
    A sleeping engine sleeps on.
    """
    output: Output = ctx.obj
    with connect(output) as client:
        found = client.pages(timeout_s=timeout)
    output.emit(PagesView(found))


def out(ctx: typer.Context, slot: Slot, name: PageName, timeout: Timeout = None) -> None:
    """Take the conversation in SLOT out into page NAME.

    The slot is free then. Waits while the slot is busy; wakes a sleeping engine. A page that
    has this name already is replaced.
    """
    done = f"out of slot {slot}"
    _run(ctx.obj, lambda client: client.page_out(name, slot), done, timeout)


def in_(ctx: typer.Context, name: PageName, slot: Slot, timeout: Timeout = None) -> None:
    """Put page NAME into SLOT, in place of what the slot holds.

    The page is gone then. Waits while the slot is busy; wakes a sleeping engine.
    """
    done = f"into slot {slot}"
    _run(ctx.obj, lambda client: client.page_in(name, slot), done, timeout)


def drop(ctx: typer.Context, name: PageName, timeout: Timeout = None) -> None:
    """Free page NAME and the conversation in it; or remove what is left in file NAME.

    Wakes a sleeping engine.
    """
    _run(ctx.obj, lambda client: client.page_drop(name), "dropped", timeout)


def _run(
    output: Output,
    call: Callable[[Client], Operation],
    done: str,
    timeout_s: float | None,
) -> None:
    from llamactl_supervisor.models import PageReceipt

    with connect(output) as client:
        doing, operation = "asking the engine", call(client)
        receipt = waiting.follow(
            client, operation, output, PageReceipt, doing=doing, timeout_s=timeout_s
        )
    output.emit(PageView(done, receipt))
