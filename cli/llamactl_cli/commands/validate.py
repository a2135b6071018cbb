"""`llamactl validate`: shows on this machine that nothing is lost, with engines of its own."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from llamactl_supervisor.errors import ExitCode

from llamactl_cli import text
from llamactl_cli.interrupts import interruptible
from llamactl_cli.options import Engine, Model
from llamactl_cli.provide import provided

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llamactl_validate.preflight import Plan
    from llamactl_validate.report import Report
    from llamactl_validate.runner import Row
    from llamactl_validate.scenario import Engines, Scale, Scenario

    from llamactl_cli.interrupts import Heard
    from llamactl_cli.output import Output

STEP_COLUMNS = 48
OF_ITS_OWN_ENGINES = {"--suite", "--model", "--engine", "--full", "--quick", "--list", "--yes"}
OF_ANOTHER_ENGINE = {"--api-key-file"}
"""Options that would change nothing otherwise."""


@dataclass(frozen=True)
class ReportView:
    """What came of each scenario, and the verdict."""

    report: Report

    def text(self) -> str:
        """Return the table, what did not pass, and one line of verdict."""
        rows = [
            (
                row.verdict.value,
                row.scenario.id,
                text.seconds(row.took_s),
                ", ".join(map(str, row.measured)),
            )
            for row in self.report.rows
        ]
        table = text.columns(("verdict", "scenario", "took", "measured"), rows)
        others = [
            f"{row.verdict}: {row.scenario.id}: {row.scenario.title}\n  {text.printable(row.why)}"
            for row in self.report.rows
            if row.why
        ]
        return "\n\n".join([table, *(["\n".join(others)] if others else []), self._line()])

    def data(self) -> dict[str, Any]:
        """Return the same."""
        return self.report.data()

    def _line(self) -> str:
        counts = self.report.counts
        told = [f"{n} {verdict}" for verdict, n in counts.items() if n or verdict == "failed"]
        if self.report.shows_nothing:
            why = "; ".join(dict.fromkeys(row.why for row in self.report.rows))
            told.insert(0, f"nothing was shown ({text.printable(why)})")
        took = text.seconds(self.report.took_s)
        return f"{self.report.verdict}: {', '.join(told)} in {took}, on {self.report.model}"


@dataclass(frozen=True)
class ListView:
    """What there is to run."""

    scenarios: Sequence[Scenario]

    def text(self) -> str:
        """Return a line for each scenario."""
        return text.columns(("scenario", "holds where it passes"), self._rows())

    def data(self) -> dict[str, Any]:
        """Return the same."""
        listed = [{"scenario": name, "title": title} for name, title in self._rows()]
        return {"scenarios": listed}

    def _rows(self) -> list[tuple[str, str]]:
        return [(each.id, each.title) for each in self.scenarios]


def validate(
    ctx: typer.Context,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite", "-s", metavar="NAME", help="This suite or scenario only; may be repeated."
        ),
    ] = None,
    model: Model = None,
    engine: Engine = None,
    full: Annotated[
        bool, typer.Option("--full", help="All cycles, not as many as fit into minutes.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The opposite, and the default.")] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit's XML there, too.")
    ] = None,
    attach: Annotated[
        str | None,
        typer.Option(
            "--attach",
            metavar="WHERE",
            help="Only look at the engine that runs at this URL or unix socket; change nothing.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", metavar="FILE", help="The key of that engine."),
    ] = None,
    only_list: Annotated[
        bool, typer.Option("--list", help="List the scenarios, run none.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Run even where it seems not to fit beside what runs.")
    ] = False,
) -> None:
    """Show on your model and machine that a change of a running engine loses nothing.

    Starts engines of its own on a private socket: they have the lowest priority, yet still take a
    little beside a busy machine, are the first to go when memory is short, and end with this
    command. What runs is not touched. Without --model and --engine those of the configuration, else
    SmolLM2 135M and the engine that `llamactl build` makes. Exit 0: passed; 1: something failed;
    2: not run, for it does not fit or makes no sense, or nothing could be shown; 130, 143, 129:
    interrupted by Ctrl-C, SIGTERM or SIGHUP, and what was found until then is reported.
    """
    from llamactl_validate import preflight, running
    from llamactl_validate.scenario import Engines, Scale
    from llamactl_validate.suites import scenarios
    from llamactl_validate.workplace import sweep

    output: Output = ctx.obj
    if full and quick:
        raise typer.BadParameter("give one of the two", param_hint="--quick with --full")
    _refuse_without_sense(ctx, attach)
    chosen = _chosen(scenarios(), suite or [])
    if only_list:
        output.emit(ListView(chosen))
        return
    if junit is not None and (junit.is_dir() or not os.access(junit.absolute().parent, os.W_OK)):
        raise typer.BadParameter(f"{junit} cannot be written", param_hint="--junit")
    if attach is not None:
        with interruptible(running.end_all) as heard:
            _finish(output, _look(output, attach, api_key_file), junit, heard)
        return
    program, weights = provided(output, engine, model)
    scale = Scale.FULL if full else Scale.QUICK
    for path in sweep():  # it may be what leaves no room
        output.say(f"removed {path}, which a killed run left behind")
    plan = preflight.plan(program, weights, chosen, scale)
    output.say(_told(plan))
    if not yes:
        plan.refuse()
    with interruptible(running.end_all) as heard:
        engines = Engines(program, weights)
        report = _run(output, chosen, engines, scale, str(weights), plan)
        _finish(output, report, junit, heard)


def _run(
    output: Output,
    chosen: Sequence[Scenario],
    engines: Engines,
    scale: Scale,
    what: str,
    plan: Plan | None = None,
) -> Report:
    """Run them; after an interrupt the report has what had ended until then."""
    from llamactl_validate import runner
    from llamactl_validate.report import Report

    began = time.monotonic()
    rows: list[Row] = []
    with (
        suppress(KeyboardInterrupt),
        _progress(output, len(chosen)) as progress,
        closing(runner.run(chosen, engines, scale, progress.step)) as ended,
    ):
        for row in ended:
            rows.append(row)
            progress.ended(row)
    met = any(row.verdict is runner.Verdict.INTERRUPTED for row in rows)
    for each in chosen[len(rows) :]:
        why = "" if met else runner.BEFORE_A_STEP
        rows.append(runner.Row(each, runner.Verdict.INTERRUPTED, why, (), 0.0))
        met = True
    took_s = time.monotonic() - began
    return Report(what, str(engines.program), scale, tuple(rows), took_s, plan)


def _look(output: Output, where: str, key_file: Path | None) -> Report:
    """Ask an engine that runs already what changes nothing."""
    from llamactl_validate import attach
    from llamactl_validate.scenario import Engines, Scale

    running = attach.Running(where, key_file)
    output.say(f"asks {where} for {', '.join(attach.ASKED)}")
    with closing(running):
        none = Engines(Path(where), Path(where))
        return _run(output, running.scenarios(), none, Scale.QUICK, where)


def _refuse_without_sense(ctx: typer.Context, attach: str | None) -> None:
    """Refuse options that would change nothing: most of them for an engine that is looked at."""
    ignored = OF_ITS_OWN_ENGINES if attach is not None else OF_ANOTHER_ENGINE
    given = [
        param.opts[0]
        for param in ctx.command.params
        if param.opts[0] in ignored and ctx.params[str(param.name)]
    ]
    if given:
        how = "with" if attach is not None else "without"
        message = f"has no use {how} --attach"
        raise typer.BadParameter(message, param_hint=", ".join(given))


def _finish(output: Output, report: Report, junit: Path | None, heard: Heard) -> None:
    """Write the report; exit with its verdict."""
    from llamactl_validate.runner import Verdict

    output.emit(ReportView(report))
    if junit is not None:
        try:
            junit.write_bytes(report.junit())
        except OSError as exc:
            output.say(f"{junit} could not be written: {exc.strerror}")
            raise typer.Exit(ExitCode.FAILED) from exc
    heard.leave()
    if report.verdict is Verdict.FAILED:
        raise typer.Exit(ExitCode.FAILED)
    if report.verdict is not Verdict.PASSED:
        raise typer.Exit(ExitCode.USAGE)


def _chosen(scenarios: list[Scenario], names: list[str]) -> list[Scenario]:
    """Return the scenarios of these suites, and those that are named themselves."""
    suites = list(dict.fromkeys(each.suite for each in scenarios))
    known = {*suites, *(each.id for each in scenarios)}
    for name in names:
        if name not in known:
            message = f"there is no suite or scenario {name!r}; there are {', '.join(suites)}, "
            message += "and what --list names"
            raise typer.BadParameter(message, param_hint="--suite")
    return [each for each in scenarios if not names or {each.suite, each.id} & {*names}]


def _told(plan: Plan) -> str:
    """Return what it will take."""
    needs = [text.need(need.what, need.n_bytes, need.there) for need in plan.needs]
    scenarios = text.count(len(plan.scenarios), "scenario")
    return f"{scenarios}: takes up to {', '.join(needs)}, and about {text.seconds(plan.seconds)}"


def _line(row: Row) -> str:
    why = f": {text.printable(row.why)}" if row.why else ""
    return f"{row.verdict}: {row.scenario.id} ({text.seconds(row.took_s)}){why}"


class _Lines:
    """A line when a scenario has ended, where nothing can be redrawn."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def step(self, _scenario: Scenario, _step: str) -> None:
        """Tell nothing of steps."""

    def ended(self, row: Row) -> None:
        """Tell what came of a scenario."""
        self._say(_line(row))


@contextmanager
def _progress(output: Output, n_scenarios: int) -> Iterator[Any]:
    if not (output.talks and sys.stderr.isatty()):
        yield _Lines(output.say)
        return
    from llamactl_validate.runner import Verdict
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.text import Text

    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=n_scenarios)

        class Bars:
            def step(self, scenario: Scenario, step: str) -> None:
                told = text.middle(text.printable(step), STEP_COLUMNS)
                bars.update(task, description=f"{scenario.id}: {told}")

            def ended(self, row: Row) -> None:
                if row.verdict is not Verdict.PASSED:
                    bars.console.print(Text(_line(row)), soft_wrap=True)
                bars.advance(task)

        yield Bars()
