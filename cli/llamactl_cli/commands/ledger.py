"""`llamactl ledger`: every weight load and why, every load avoided, what was carried over."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from llamactl_supervisor.errors import LlamactlError

from llamactl_cli import text
from llamactl_cli.connect import connect
from llamactl_cli.moments import Since
from llamactl_cli.options import ledger_lines
from llamactl_cli.views import CARRIED

if TYPE_CHECKING:
    from llamactl_supervisor.models import Ledger, LedgerLine

    from llamactl_cli.output import Output

NAMES = ("when", "what", "by", "took", "of")
BY_COLUMNS = 16
ANSWER_S = 1.0
"""How long the daemon may take over the little that the file does not have."""


@dataclass(frozen=True)
class LedgerView:
    """Lines of the ledger, and what they add up to."""

    ledger: Ledger
    is_part: bool = False
    """Whether there may be lines that are not shown."""

    def text(self) -> str:
        """Return the table with the sums below, or that there is nothing."""
        lost = self.ledger.lost
        if not self.ledger.lines and self.ledger.unreadable:
            return f"no lines, {self._unreadable()}"
        if not self.ledger.lines:
            return f"no lines; lost {text.lost(lost)}" if lost else "no lines"
        table = text.columns(NAMES, (_row(line) for line in self.ledger.lines))
        return f"{table}\n\n{text.screen(self._sums())}"

    def data(self) -> dict[str, Any]:
        """Return the lines as they are written, the sums over them, and over the whole ledger."""
        return self.ledger.model_dump(mode="json") | {"sums": self.sums()}

    def sums(self) -> dict[str, Any]:
        """Return the sums over the lines shown.

        `load_s` is over the `loads_timed`: nobody saw how long the others took. None without one.
        `saved_s` is an estimate: each load avoided would have taken as long as the median load
        did, and the prefill of what was held is not even counted. None where no load was timed.
        """
        loads = [line for line in self.ledger.lines if line.kind == "load"]
        avoided = [line for line in self.ledger.lines if line.kind == "avoided"]
        done = [line.load_s for line in loads if line.loaded]
        took = [load_s for load_s in done if load_s is not None]
        pauses_s = sum(line.pause_ms for line in avoided) / 1000
        return {
            "loads": len(done),
            "loads_failed": sum(not (line.loaded or line.aborted) for line in loads),
            "loads_aborted": sum(line.aborted for line in loads),
            "loads_timed": len(took),
            "load_s": round(sum(took), 3) if took else None,
            "loads_avoided": len(avoided),
            "pause_s": round(pauses_s, 6),
            "saved_s": round(len(avoided) * median(took) - pauses_s, 3) if took else None,
        }

    @property
    def over(self) -> str:
        """Say what the sums are over."""
        lines = text.count(len(self.ledger.lines), "line")
        return f"in the {lines} shown" if self.is_part else "in all"

    def _sums(self) -> list[tuple[str, str | None]]:
        sums = self.sums()
        failed = f", {sums['loads_failed']} failed" if sums["loads_failed"] else ""
        failed += f", {sums['loads_aborted']} aborted" if sums["loads_aborted"] else ""
        saved, lost = None, self.ledger.lost
        if sums["saved_s"] is not None and sums["loads_avoided"]:
            saved = f"about {text.seconds(max(0.0, sums['saved_s']))}"
            saved += " (estimate: each as long as the median load here; prefill not counted)"
        return [
            ("loads", f"{sums['loads']}{_took(sums)} {self.over}{failed}"),
            (
                "avoided",
                f"{sums['loads_avoided']}, {sums['pause_s'] * 1000:.1f} ms paused {self.over}",
            ),
            ("saved", saved),
            ("lost", f"{text.lost(lost)}: no disk took them" if lost else None),
            ("unreadable", self._unreadable()),
        ]

    def _unreadable(self) -> str | None:
        """Say how many lines of the file are in no sum."""
        number = self.ledger.unreadable
        return f"{text.count(number, 'line')} of the file that make no sense" if number else None


def _took(sums: dict[str, Any]) -> str:
    """Return how long the loads took that were timed; those that were not say so."""
    timed, n_unseen = sums["loads_timed"], sums["loads"] - sums["loads_timed"]
    seconds = f", {text.seconds(sums['load_s'])}" if timed else ""
    return f"{seconds} ({n_unseen} not timed)" if n_unseen else seconds


def _row(line: LedgerLine) -> tuple[str, ...]:
    at = f"{line.at.astimezone():%m-%d %H:%M:%S}"
    by = text.middle(re.sub(r"^(tcp .*) port [0-9]+$", r"\1", line.by), BY_COLUMNS)
    if line.kind == "avoided":
        change = f"{text.shape(line.previous)} > {text.shape(line.geometry)}"
        return (at, "avoided", by, f"{line.pause_ms:.1f} ms", change)
    if line.kind == "carried":
        fates = [each.fate.value for each in line.conversations]
        said = [f"{fates.count(fate)} {name}" for fate, name in CARRIED.items() if fate in fates]
        lost = [each.what for each in line.conversations if each.fate == "lost"]
        named = [f"{said.pop()}: {', '.join(lost)}"] if lost else []
        broken = [] if line.problem is None else [line.problem.message]
        what = text.printable(", ".join([text.size(line.n_bytes), *said, *named, *broken]))
        return (at, f"carried {line.way}", by, text.seconds(line.took_s), what)
    if line.kind == "lost":
        return (at, "apply cut off", by, "", line.came_to)
    if line.kind == "left":
        return (at, f"left: {line.outcome}", by, text.seconds(line.lingered_s), "")
    size = "" if line.model_bytes is None else f"{text.size(line.model_bytes)}, "
    how = "load" if line.loaded else "aborted" if line.aborted else "failed"
    what = f"{how}: {line.cause}"
    took = "" if line.load_s is None else text.seconds(line.load_s)
    why = f", for {', '.join(line.reasons)}" if line.reasons else ""
    if line.port_closed_s is not None:
        why += f", port closed {text.seconds(line.port_closed_s)}"
    return (at, what, by, took, size + text.shape(line) + why)


def ledger(
    ctx: typer.Context,
    since: Since = None,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines", "-n", parser=ledger_lines, metavar="LINES", help="The newest, so many."
        ),
    ] = None,
) -> None:
    """Show every weight load and why, every load avoided and its pause, what was carried over.

    Needs no daemon. The sums are over the lines shown; with --json those over all are there too.
    """
    from llamactl_supervisor import ledger as stored

    output: Output = ctx.obj
    with connect(output) as client:
        found = stored.read(client.paths.ledger_file, since=since, limit=lines)
        with contextlib.suppress(LlamactlError):  # it alone knows what it could not write
            known = client.ledger(limit=0, timeout_s=ANSWER_S)
            found = found.model_copy(update={"lost": known.lost})
    output.emit(LedgerView(found, is_part=lines is not None or since is not None))
