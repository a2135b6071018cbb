"""`llamactl doctor`: what is wrong here, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer
from llamactl_supervisor.errors import ExitCode, LlamactlError

from llamactl_cli import text
from llamactl_cli.checks import Finding, Level, fail, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llamactl_cli.checks.case import Case
    from llamactl_cli.output import Output


@dataclass(frozen=True)
class DoctorView:
    """Every answer."""

    findings: list[Finding]

    def text(self) -> str:
        """Return a line for each, and below it what to do."""
        rows: list[tuple[str, str | None]] = []
        for found in self.findings:
            rows.append((f"{found.level:<4}  {found.check}", text.printable(found.found)))
            if found.do:
                rows.append(("", f"-> {text.printable(found.do)}"))
        counts = [sum(found.level is level for found in self.findings) for level in Level]
        return f"{text.screen(rows)}\n\n{counts[0]} ok, {counts[1]} to look at, {counts[2]} wrong"

    def data(self) -> dict[str, Any]:
        """Return the same."""
        return {"findings": [asdict(found) for found in self.findings]}

    @property
    def well(self) -> bool:
        """Whether nothing is wrong."""
        return all(found.level is not Level.FAIL for found in self.findings)


def doctor(ctx: typer.Context) -> None:
    """Check machine, engine, model, directories, memory and service.

    Touches nothing and needs no daemon. Exit 0: nothing is wrong; 1: something is.
    """
    from llamactl_supervisor.config import load_paths

    from llamactl_cli.checks import machine, options, places, service
    from llamactl_cli.checks.case import Case

    output: Output = ctx.obj
    try:
        case = Case.of(load_paths(broken=lambda _: None))  # told by a check of its own
    except LlamactlError as exc:
        view = DoctorView([fail("paths", exc.message, exc.hint or "")])
    else:
        checks = (*machine.CHECKS, *options.CHECKS, *places.CHECKS, *service.CHECKS)
        view = DoctorView([found for check in checks for found in _answers(check, case)])
    output.emit(view)
    if not view.well:
        raise typer.Exit(ExitCode.FAILED)


def _answers(check: Callable[[Case], Iterator[Finding]], case: Case) -> Iterator[Finding]:
    """Yield what a check finds; one that the machine does not let look says so."""
    try:
        yield from check(case)
    except OSError as exc:
        what = exc.strerror or str(exc)
        told = what if exc.filename is None else f"{exc.filename}: {what}"
        yield warn(check.__name__, f"cannot be checked: {told}", "see the message")
