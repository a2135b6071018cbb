"""`llamactl bench`: what a live change costs here, and what a relaunch would, measured in turn."""

from __future__ import annotations

import os
import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from llamactl_supervisor.errors import ExitCode, FailedError

from llamactl_cli import text, versions
from llamactl_cli.interrupts import interruptible
from llamactl_cli.moments import span
from llamactl_cli.options import Engine, Model
from llamactl_cli.provide import Provider, given_engine, provided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llamactl_bench.cell import Cell, Machine, Outcome
    from llamactl_bench.grid import Speed
    from llamactl_bench.measure import Subject
    from llamactl_bench.record import Record
    from llamactl_bench.report import Report

    from llamactl_cli.interrupts import Heard
    from llamactl_cli.output import Output

UNPATCHED = "unpatched"
BUDGET = "20m"
NOTHING_MEASURED = "nothing_measured"


@dataclass(frozen=True)
class ReportView:
    """The tables, and what has to be said beside them."""

    report: Report
    as_markdown: bool

    def text(self) -> str:
        """Return them."""
        if self.as_markdown:
            return self.report.markdown()
        shown = [
            f"{table.title}\n{text.columns(table.columns, table.rows)}"
            for table in self.report.tables()
        ]
        notes = [text.printable(note) for note in self.report.notes()]
        return "\n\n".join([*shown, "\n".join(notes)])

    def data(self) -> dict[str, Any]:
        """Return every round of every cell."""
        return self.report.data()


@dataclass(frozen=True)
class ListView:
    """What is measured."""

    cells: Sequence[Cell]

    def text(self) -> str:
        """Return a line for each cell, what says most first."""
        rows = [tuple(map(str, each.values())) for each in self.data()["cells"]]
        return text.columns(("table", "held tokens", "slots", "n_ctx", "rounds"), rows)

    def data(self) -> dict[str, Any]:
        """Return the same."""
        return {"cells": [each.model_dump(mode="json") for each in self.cells]}


def bench(
    ctx: typer.Context,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="unpatched|PATH",
            help="Relaunch this one: the engine without the patches, or any llama-server.  "
            "[default: the same engine]",
        ),
    ] = None,
    model: Model = None,
    engine: Engine = None,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", "-t", metavar="NAME", help="This table only; may be repeated."),
    ] = None,
    budget: Annotated[
        timedelta,
        typer.Option(
            "--budget", parser=span, metavar="TIME", help="Leave out what takes longer: 90s, 2h."
        ),
    ] = BUDGET,  # type: ignore[assignment]
    quick: Annotated[
        bool, typer.Option("--quick", help="Two cells of each row at most, in fewer rounds.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on: what was finished before is not measured again."),
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="The tables as Markdown on stdout.")
    ] = False,
    plots: Annotated[
        Path | None, typer.Option("--plots", metavar="DIR", help="Write plots there, as SVG.")
    ] = None,
    only_list: Annotated[
        bool, typer.Option("--list", help="List what would be measured, measure nothing.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Run even where it seems not to fit beside what runs.")
    ] = False,
) -> None:
    """Measure on your model and machine what a live change costs, and what a relaunch would.

    Both are measured in turn, in one run, on engines of this command's own: private, the first to
    go when memory is short, gone with the command. They compute as urgently as anything else, so
    that a busy machine disturbs the numbers, and is disturbed; the report says where it did. Each
    finished cell is kept until it is measured anew, whatever else is measured: what an interrupt or
    the budget cut off is measured by --resume. Exit 0: measured, now or before; 1: a cell failed,
    or there is no number at all; 2: not run, for it does not fit or makes no sense; 5: another one
    is measuring; 130, 143, 129: interrupted by Ctrl-C, SIGTERM or SIGHUP, and what was measured
    until then is reported.
    """
    from llamactl_bench import grid
    from llamactl_bench import plots as drawing
    from llamactl_bench.cell import Table
    from llamactl_bench.measure import Subject
    from llamactl_validate import running

    output: Output = ctx.obj
    if baseline not in (None, UNPATCHED):
        _given_baseline(Path(baseline))
    if baseline is None and Table.SPEED in _tables(table or []):
        message = "compares two engines: name the other one with --baseline"
        raise typer.BadParameter(message, param_hint=f"--table {Table.SPEED}")
    cells = grid.cells(quick=quick, speed=baseline is not None, tables=_tables(table or []))
    if only_list:
        output.emit(ListView(cells))
        return
    if plots is not None:
        drawing.need()
        _writable(plots)
    program, weights = provided(output, engine, model)
    subject = Subject(program, _baseline(output, baseline, program), weights)
    with interruptible(running.end_all) as heard:
        outcomes = _outcomes(output, cells, subject, budget, resume=resume, yes=yes)
        report = _report(subject, _against(baseline), outcomes, cells, interrupted=heard.code != 0)
        _finish(output, report, plots, as_markdown, heard)


def _outcomes(
    output: Output,
    cells: Sequence[Cell],
    subject: Subject,
    budget: timedelta,
    *,
    resume: bool,
    yes: bool,
) -> list[Outcome]:
    """Return what was found in the cells, now or before; an interrupt leaves the rest out."""
    from llamactl_bench import grid, machine, record, room
    from llamactl_supervisor.config import load_paths
    from llamactl_validate.workplace import sweep

    for path in sweep():  # it may be what leaves no room
        output.say(f"removed {path}, which a killed run left behind")
    program, weights = subject.program, subject.model
    here = machine.look()
    speed = grid.Speed.of(weights.stat().st_size, here.cores)
    programs = {"engine": program, "baseline": subject.baseline}
    conditions = record.digest(record.conditions(programs, weights, here.cpu))
    path = load_paths().cache / "bench" / "cells.jsonl"
    with closing(record.Record(path, conditions)) as kept:
        if kept.unreadable:
            output.say(f"{path}: {text.count(kept.unreadable, 'line')} of no sense left out")
        before = [kept.finished[cell] for cell in cells if cell in kept.finished]
        outcomes = before if resume else []
        if before:
            told = "" if resume else ": kept until measured anew, and taken by --resume"
            output.say(f"{text.count(len(before), 'cell')} measured before{told}")
        known = {each.cell for each in outcomes}
        wanted = [cell for cell in cells if cell not in known]
        need_one = not outcomes and not yes
        too_large, needs = room.fitting(program, weights, wanted, required=need_one)
        if yes:
            too_large = []
        outcomes += too_large
        without = {each.cell for each in too_large}
        wanted = [cell for cell in wanted if cell not in without]
        if wanted:
            about_s = sum(grid.estimate_s(cell, speed) for cell in wanted)
            takes = [text.need(need.what, need.n_bytes, need.there) for need in needs]
            takes.append(f"about {text.seconds(about_s)}")
            output.say(
                f"{text.count(len(wanted), 'cell')} to measure: takes up to {', '.join(takes)}, "
                f"at most {text.seconds(budget.total_seconds())}"
            )
        outcomes += _run(output, wanted, subject, kept, speed, budget, here)
        if kept.n_lost:
            lost = text.count(kept.n_lost, "cell")
            output.say(f"{path}: {lost} could not be kept for --resume: {kept.why_lost}")
    return outcomes


def _run(
    output: Output,
    cells: Sequence[Cell],
    subject: Subject,
    kept: Record,
    speed: Speed,
    budget: timedelta,
    here: Machine,
) -> list[Outcome]:
    from llamactl_bench import grid, runner

    outcomes: list[Outcome] = []
    redrawn = sys.stderr.isatty()

    def step(cell: Cell, now: str) -> None:
        if redrawn:
            news(f"{cell}: {now}")

    with suppress(KeyboardInterrupt), output.activity("starts") as news:
        spent = grid.Budget(budget.total_seconds())
        for outcome in runner.run(cells, subject, kept, speed, spent, here, step):
            outcomes.append(outcome)
            how = outcome.why_not or text.seconds(outcome.took_s)
            news(f"{len(outcomes)} of {len(cells)}: {outcome.cell}: {how}")
    return outcomes


def _report(
    subject: Subject,
    against: str,
    outcomes: Sequence[Outcome],
    cells: Sequence[Cell],
    *,
    interrupted: bool,
) -> Report:
    from llamactl_bench.report import Report

    return Report(
        model=str(subject.model),
        engine=str(subject.program),
        baseline=str(subject.baseline),
        against=against,
        outcomes=tuple(outcomes),
        n_cells=len(cells),
        took_s=sum(each.took_s for each in outcomes),
        interrupted=interrupted,
    )


def _finish(
    output: Output, report: Report, plots: Path | None, as_markdown: bool, heard: Heard
) -> None:
    """Write the report; fail where a cell has, or where there is no number at all."""
    from llamactl_bench import plots as drawing

    if plots is not None:
        for path in drawing.write(plots, report.outcomes, report.against):
            output.say(f"wrote {path}")
    if report.n_left and not report.interrupted:
        left = text.count(report.n_left, "cell")
        output.say(f"{left} left out for the budget: the same words with --resume go on")
    output.emit(ReportView(report, as_markdown))
    heard.leave()
    if report.failed:
        raise typer.Exit(ExitCode.FAILED)
    if not report.measured:
        raise _nothing(report)


def _nothing(report: Report) -> FailedError:
    """Return why there is no number, and what would help."""
    n_left, n_skipped = report.n_left, len(report.outcomes)
    found = [
        (n_left, "left out for the budget", "give it more time with --budget"),
        (
            n_skipped,
            "skipped",
            "the report says what each lacks: memory, or a model that takes more",
        ),
    ]
    why = ", ".join(f"{text.count(n, 'cell')} {what}" for n, what, _ in found if n)
    hint = "; ".join(help_ for n, _, help_ in found if n)
    return FailedError(NOTHING_MEASURED, f"nothing was measured: {why}", hint=hint)


def _tables(names: Sequence[str]) -> list[Any]:
    from llamactl_bench.cell import Table

    known = [table.value for table in Table]
    for name in names:
        if name not in known:
            message = f"there is no table {name!r}; there are {', '.join(known)}"
            raise typer.BadParameter(message, param_hint="--table")
    return [Table(name) for name in names]


def _baseline(output: Output, asked: str | None, program: Path) -> Path:
    if asked is None:
        return program
    if asked == UNPATCHED:
        return Provider(output).build(unpatched=True).path
    return Path(asked).absolute()


def _given_baseline(path: Path) -> None:
    """Prove that it is a llama-server, of whichever build."""
    given_engine(path, "--baseline")
    if versions.of_engine(str(path.absolute())) is None:
        message = f"{path} is no llama-server: it does not say its version"
        raise typer.BadParameter(message, param_hint="--baseline")


def _against(asked: str | None) -> str:
    """Return what a baseline is, in words."""
    if asked is None:
        return "the same engine"
    return "llama-server without the patches" if asked == UNPATCHED else asked


def _writable(directory: Path) -> None:
    there = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise typer.BadParameter(f"{directory} cannot be written", param_hint="--plots")
