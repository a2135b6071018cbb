"""`llamactl ledger`: every weight load and why, every load avoided and its pause."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from llamactl_supervisor.errors import DaemonUnreachableError

from llamactl_cli import text
from llamactl_cli.connect import connect
from llamactl_cli.moments import Since
from llamactl_cli.options import ledger_lines

if TYPE_CHECKING:
    from llamactl_supervisor.models import Ledger, LedgerLine

    from llamactl_cli.output import Output

NAMES = ("when", "what", "by", "took", "of")
BY_COLUMNS = 16


@dataclass(frozen=True)
class LedgerView:
    """Lines of the ledger, and what they add up to."""

    ledger: Ledger

    def text(self) -> str:
        """Return the table with the sums below, or that there is nothing."""
        if not self.ledger.lines:
            return "no lines"
        table = text.columns(NAMES, (_row(line) for line in self.ledger.lines))
        return f"{table}\n\n{text.screen(self._sums())}"

    def data(self) -> dict[str, Any]:
        """Return the lines as they are written, the sums over them, and over the whole ledger."""
        return self.ledger.model_dump(mode="json") | {"sums": self.sums()}

    def sums(self) -> dict[str, Any]:
        """Return the sums over the lines shown.

        `saved_s` is an estimate: each load avoided would have taken as long as the median load
        did, and the prefill of what was held is not even counted. None where nothing was loaded.
        """
        loads = [line for line in self.ledger.lines if line.kind == "load"]
        avoided = [line for line in self.ledger.lines if line.kind == "avoided"]
        done = [line.load_s for line in loads if line.loaded]
        took = [load_s for load_s in done if load_s is not None]
        pauses_s = sum(line.pause_ms for line in avoided) / 1000
        return {
            "loads": len(done),
            "loads_failed": len(loads) - len(done),
            "load_s": round(sum(took), 3),
            "loads_avoided": len(avoided),
            "pause_s": round(pauses_s, 6),
            "saved_s": round(len(avoided) * median(took) - pauses_s, 3) if took else None,
        }

    def _sums(self) -> list[tuple[str, str | None]]:
        sums = self.sums()
        failed = f", {sums['loads_failed']} failed" if sums["loads_failed"] else ""
        saved = None
        if sums["saved_s"] is not None and sums["loads_avoided"]:
            saved = f"about {text.seconds(max(0.0, sums['saved_s']))}"
            saved += " (estimate: each as long as the median load here; prefill not counted)"
        return [
            ("loads", f"{sums['loads']}, {text.seconds(sums['load_s'])} in all{failed}"),
            ("avoided", f"{sums['loads_avoided']}, {sums['pause_s'] * 1000:.1f} ms paused in all"),
            ("saved", saved),
        ]


def _row(line: LedgerLine) -> tuple[str, ...]:
    at = f"{line.at.astimezone():%m-%d %H:%M:%S}"
    by = text.middle(line.by, BY_COLUMNS)
    if line.kind == "avoided":
        change = f"{text.shape(line.previous)} > {text.shape(line.geometry)}"
        return (at, "avoided", by, f"{line.pause_ms:.1f} ms", change)
    size = "" if line.model_bytes is None else f"{text.size(line.model_bytes)}, "
    what = f"{'load' if line.loaded else 'failed'}: {line.cause}"
    took = "" if line.load_s is None else text.seconds(line.load_s)
    return (at, what, by, took, size + text.shape(line))


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
    """Show every weight load and why, every load avoided and its pause.

    Needs no daemon. The sums are over the lines shown; with --json those over all are there too.
    """
    from llamactl_supervisor.client import read_ledger

    output: Output = ctx.obj
    with connect(output) as client:
        try:
            found = client.ledger(since=since, limit=lines)
        except DaemonUnreachableError:
            found = read_ledger(client.paths, since=since, limit=lines)
    output.emit(LedgerView(found))
