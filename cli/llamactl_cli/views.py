"""Views that more than one command shows: what an engine is, what an operation came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl_cli import text

if TYPE_CHECKING:
    from llamactl_supervisor.models import LifecycleResult, Receipt


@dataclass(frozen=True)
class LifecycleView:
    """What start, stop, restart or down came to."""

    result: LifecycleResult

    def text(self) -> str:
        """Return one line."""
        facts = [f"engine {self.result.outcome.replace('_', ' ')}"]
        if self.result.pid is not None:
            facts.append(f"pid {self.result.pid}")
        if self.result.load_s is not None:
            facts.append(f"loaded in {text.seconds(self.result.load_s)}")
        return ", ".join(facts)

    def data(self) -> dict[str, Any]:
        """Return the result as the daemon gave it."""
        return self.result.model_dump(mode="json")


@dataclass(frozen=True)
class ReceiptView:
    """The engine's receipt for one reconfigure."""

    receipt: Receipt

    def text(self) -> str:
        """Return before and after, the pause and its phases, what was held, the weight loads."""
        receipt = self.receipt
        planned = receipt.outcome == "planned"
        loads = receipt.n_weight_loads
        rows = [
            (receipt.outcome, self._outcome()),
            ("before", text.geometry(receipt.previous)),
            ("would be" if planned else "after", text.geometry(receipt.geometry)),
            ("usable", text.usable(receipt.geometry)),
            ("pause", None if planned else self._pause()),
            ("beside it", self._beside()),
            ("held", self._held()),
            *(
                (f"slot {slot.slot}", f"{text.count(slot.tokens, 'token')}, {slot.fate}")
                for slot in receipt.slots
            ),
            *(
                (
                    f"slot {slot.slot}",
                    f"{'would be ' if planned else ''}parked whole ({slot.reason}): "
                    f"holds {slot.tokens_held} tokens, {slot.tokens_fit} fit",
                )
                for slot in receipt.parked
            ),
            ("weights", None if loads is None else f"loaded {times(loads)} by this engine"),
        ]
        return text.table(rows)

    def data(self) -> dict[str, Any]:
        """Return the receipt as the engine gave it."""
        return self.receipt.model_dump(mode="json")

    def _outcome(self) -> str:
        match self.receipt.outcome:
            case "applied":
                return "the geometry changed on the loaded weights"
            case "unchanged":
                return "the engine has this geometry already; nothing was touched"
            case _:
                return "a dry run; nothing was touched"

    def _pause(self) -> str:
        parts = text.phases(self.receipt.phases_ms)
        return f"{self.receipt.pause_ms:.1f} ms" + (f" ({parts})" if parts else "")

    def _beside(self) -> str | None:
        spent = self.receipt.outside_pause_ms
        if not spent:
            return None
        return f"{sum(spent.values()):.1f} ms ({text.phases(spent)})"

    def _held(self) -> str:
        tokens = text.count(self.receipt.tokens_held, "token")
        return f"{tokens}, {text.size(self.receipt.bytes_held)}"


def times(number: int) -> str:
    """Return `once`, `2 times`."""
    return "once" if number == 1 else f"{number} times"
