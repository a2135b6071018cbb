"""How the builder reports what it is doing, and a bar on the terminal for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True)
class Progress:
    """One report: a stage in a few words; `total` is 0 while the length is unknown."""

    stage: str
    done: int = 0
    total: int = 0


ProgressCallback = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """Report to nobody."""


class TerminalProgress:
    """A context manager to be called with reports; draws on stderr, plain lines off a tty."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.bars = Bars(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bars.add_task("", total=None, visible=False)
        self.last = Progress("")

    def __enter__(self) -> TerminalProgress:
        self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bars.stop()

    def __call__(self, report: Progress) -> None:
        if self.console.is_terminal:
            self.bars.update(
                self.task,
                description=report.stage,
                completed=report.done,
                total=report.total or None,
                visible=True,
            )
        elif report.stage != self.last.stage or _tenths(report) != _tenths(self.last):
            count = f" {report.done}/{report.total}" if report.total else ""
            self.console.print(f"{report.stage}{count}", highlight=False)
        self.last = report


def _tenths(report: Progress) -> int:
    return report.done * 10 // report.total if report.total else 0
