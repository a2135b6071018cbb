"""Views that more than one command shows: what an engine is, what an operation came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from llamactl_supervisor.errors import Code, ExitCode

from llamactl_cli import text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamactl_supervisor.models import (
        CarriedConversation,
        CarryReport,
        LifecycleResult,
        Receipt,
    )

    Rows = Iterator[tuple[str, str | None]]


CARRIED: dict[str, str] = {
    "back": "brought back",
    "written": "kept in files",
    "left": "left in files",
    "dropped": "dropped from files",
    "lost": "lost",
}
"""What a person reads of each fate of a conversation, in this order."""
SLEPT = "it slept: its slots held nothing any more, only pages are kept"


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
        if self.result.port_closed_s is not None:
            facts.append(f"port closed for {text.seconds(self.result.port_closed_s)}")
        slept = [SLEPT] if self.result.slept else []
        what, *named = carried(self.result.carried) or [""]
        told = [f"conversations: {what}"] if what else []
        return "\n".join([", ".join(facts), *slept, *told, *(f"  {line}" for line in named)])

    def data(self) -> dict[str, Any]:
        """Return the result as the daemon gave it."""
        return self.result.model_dump(mode="json")


@dataclass(frozen=True)
class ReceiptView:
    """The engine's receipt for one reconfigure."""

    receipt: Receipt

    def text(self) -> str:
        """Return before and after, the pause and its phases, what was held, the weight loads."""
        receipt, loads = self.receipt, self.receipt.n_weight_loads
        last = "would be" if receipt.outcome == "planned" else "after"
        rows = [
            (receipt.outcome, self._outcome()),
            ("before", text.geometry(receipt.previous)),
            (last, text.geometry(receipt.geometry)),
            ("usable", text.usable(receipt.geometry)),
            *(self._spent() if receipt.outcome == "applied" else []),
            *([] if receipt.outcome == "unchanged" else self._fates()),
            ("weights", None if loads is None else f"loaded {text.times(loads)} by this engine"),
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

    def _spent(self) -> Rows:
        pause, beside = self.receipt.phases_ms, self.receipt.outside_pause_ms
        yield "pause", f"{self.receipt.pause_ms:.1f} ms{_in_brackets(text.phases(pause))}"
        if beside:
            yield "beside it", f"{sum(beside.values()):.1f} ms{_in_brackets(text.phases(beside))}"

    def _fates(self) -> Rows:
        receipt = self.receipt
        tokens = text.count(receipt.tokens_held, "token")
        yield "held", f"{tokens}, {text.size(receipt.bytes_held)}"
        for slot in receipt.slots:
            if slot.fate == "parked":
                continue  # told below, with the reason
            moved = "" if slot.other_slot is None else f" from slot {slot.other_slot}"
            yield f"slot {slot.slot}", f"{text.count(slot.tokens, 'token')}, {slot.fate}{moved}"
        for device, n_bytes in receipt.bytes_needed.items():
            yield "needs", f"{text.size(n_bytes)} on {device}"
        would = "would be " if receipt.outcome == "planned" else ""
        for parked in receipt.parked:
            fit = f"holds {parked.tokens_held} tokens, {parked.tokens_fit} fit"
            waits = ", its request waits" if parked.running else ""
            yield f"slot {parked.slot}", f"{would}parked whole ({parked.reason}): {fit}{waits}"
        if receipt.parked and receipt.outcome == "applied":
            yield "parked", "a reconfigure that has room for it places it back"


def end(result: LifecycleResult | None, *, accept_loss: bool = False) -> None:
    """End the command as one that failed where conversations were lost that were to be kept.

    Nobody wanted to keep them who cut the writing short (a second `--now`).
    """
    report = None if result is None else result.carried
    if report is None or accept_loss or not report.has_losses:
        return
    if report.problem is None or report.problem.code != Code.SUPERSEDED:
        raise typer.Exit(ExitCode.FAILED)


def carried(report: CarryReport | None) -> list[str]:
    """Return one line for all the conversations, then one for each that is not where it was."""
    if report is None:
        return []
    problem = [] if report.problem is None else [text.printable(report.problem.message)]
    fates = ((fate, report.of(fate)) for fate in CARRIED)
    said = [f"{len(found)} {CARRIED[fate]}" for fate, found in fates if found]
    if not said:
        return problem
    tokens = text.count(sum(each.n_tokens for each in report.conversations), "token")
    took = f"{text.size(report.n_bytes)} in {text.seconds(report.took_s)}"
    cut = f", {text.count(report.n_cut, 'request')} cut" if report.n_cut else ""
    named = (line for line in map(_named, report.conversations) if line is not None)
    return [f"{', '.join(said)} ({tokens}, {took}{cut})", *problem, *map(text.printable, named)]


def _named(each: CarriedConversation) -> str | None:
    """Return what became of one; None: it is where it was, or in files for the next engine."""
    why = "" if each.reason is None else f": {each.reason}"
    tokens = text.count(each.n_tokens, "token")
    if each.fate == "back" and each.place != each.what:
        return f"{each.what} -> {each.place} ({tokens}){why}"
    if each.fate in {"back", "written"} and not why:
        return None
    file = "" if each.place != each.file else f" in {each.file}"
    return f"{each.fate}{file}: {each.what} ({tokens}){why}"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
