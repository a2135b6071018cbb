"""`llamactl slots`: what each slot holds, and what is parked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from llamactl_cli import text
from llamactl_cli.connect import connect
from llamactl_cli.options import READ_TIMEOUT_S, ReadTimeout

if TYPE_CHECKING:
    from llamactl_supervisor.models import Slots, SlotState

    from llamactl_cli.output import Output


@dataclass(frozen=True)
class SlotsView:
    """The slots, then the parked ones, each with the page it is kept in."""

    slots: Slots

    def text(self) -> str:
        """Return the table."""
        rows = [
            (str(slot.id), _state(slot), _tokens(slot), str(slot.n_ctx))
            for slot in self.slots.slots
        ]
        return text.columns(("slot", "state", "tokens", "window"), rows)

    def data(self) -> dict[str, Any]:
        """Return the slots as the engine gave them."""
        return self.slots.model_dump(mode="json", exclude_unset=True)


def _state(slot: SlotState) -> str:
    if slot.parked:
        waits = ", its request waits" if slot.is_processing else ""
        return f"parked as {slot.page}{waits}"
    return "busy" if slot.is_processing else "idle"


def _tokens(slot: SlotState) -> str:
    return "-" if slot.n_prompt_tokens is None else str(slot.n_prompt_tokens)


def slots(ctx: typer.Context, timeout: ReadTimeout = READ_TIMEOUT_S) -> None:
    """Show the slots and what they hold.

    A parked conversation is listed with the slot it was in and the page it is kept in. A
    sleeping engine is woken, which loads its weights.
    """
    output: Output = ctx.obj
    with connect(output) as client, output.activity("asking the engine"):
        found = client.slots(timeout_s=timeout)
    output.emit(SlotsView(found))
