"""`llamactl pages fsck` and `gc`: a directory of page files, checked and swept."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from llamactl_cli import text
from llamactl_cli.connect import connect
from llamactl_cli.options import PAGE_DAYS, PageDays
from llamactl_cli.provide import Provider, given_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from llamactl_supervisor.client import Client
    from llamactl_supervisor.models import UpRequest

    from llamactl_cli.output import Output

PROGRAM = "llama-page-files"
"""Stands beside the engine; its first comment says what it does to which file."""
DAMAGED, INCOMPLETE = 1, 2
"""Exit codes of the program and of the commands."""
WAITING = "waiting"
"""Not a finding about a file: news for whoever waits."""
STAGING = ".page-staging"
"""No page's name can end in it: what an interrupted publication left."""
PAGE_STATES = ("whole", "plain", "degraded", "damaged", "unknown", "pending")
PAGES_OPTION = "--slot-save-path"
"""The engine takes `_` for `-` in it."""


def _directory(value: str) -> Path:
    """Return the path. An empty one is a slip: it would be the working directory."""
    if not value:
        raise typer.BadParameter("the name of the directory is empty", param_hint="DIR")
    return Path(value)


Directory = Annotated[
    Path | None,
    typer.Argument(
        parser=_directory, metavar="[DIR]", help="Of page files. [default: the engine's own]"
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]
Engine = Annotated[
    Path | None,
    typer.Option(
        "--engine", metavar="PATH", help="Use the program beside this llama-server; build nothing."
    ),
]


@dataclass(frozen=True)
class Loss:
    """A part of a page that cannot be used."""

    file: str
    why: str


@dataclass(frozen=True)
class Finding:
    """A line of the program; `removes` is what it is about to do, `done` that it has done it."""

    what: str
    name: str
    n_bytes: int
    why: str
    losses: tuple[Loss, ...]
    to: str
    removes: bool
    done: bool

    @classmethod
    def parse(cls, line: str) -> Finding:
        """Return the finding. Raises ValueError, KeyError or TypeError where it is none."""
        row = json.loads(line)
        losses = tuple(Loss(loss["file"], loss["why"]) for loss in row["losses"])
        return cls(**{field.name: row[field.name] for field in fields(cls)} | {"losses": losses})

    def cells(self) -> tuple[str, str, str, str]:
        """Return what a table has of it."""
        said = [self.why, *(f"{loss.file}: {loss.why}" for loss in self.losses)]
        if self.to:
            said.append(f"{'moved' if self.done else 'to be moved'} to {self.to}")
        if self.removes:
            said.append("removed" if self.done else "to be removed")
        n_bytes = text.size(self.n_bytes) if self.n_bytes else ""
        return (self.what, self.name, n_bytes, "; ".join(filter(None, said)))


@dataclass(frozen=True)
class CheckView:
    """What was found in a directory and done about it."""

    verb: str
    directory: Path
    dry_run: bool
    findings: tuple[Finding, ...]

    def text(self) -> str:
        """Return the table where there is one, and the verdict."""
        names = ("state", "name", "bytes", "what about it")
        cells = [finding.cells() for finding in self.findings]
        table = [text.columns(names, cells)] if cells else []
        return "\n".join([*table, self.verdict()])

    def data(self) -> dict[str, Any]:
        """Return everything that was found."""
        return {
            "directory": str(self.directory),
            "dry_run": self.dry_run,
            "verdict": self.verdict(),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def verdict(self) -> str:
        """Return one line that is enough to know whether to worry."""
        said = self._checked() if self.verb == "fsck" else self._removed()
        failed = sum(finding.what == "failed" for finding in self.findings)
        if failed:
            said.append(f"{failed} could not be read or done, see above")
        if self.dry_run:
            said.append("dry run, nothing was changed")
        return f"{self.directory}: {'; '.join(said)}"

    def _checked(self) -> list[str]:
        staging = [finding for finding in self.findings if finding.name.endswith(STAGING)]
        found = Counter(finding.what for finding in self.findings if finding not in staging)
        pages = sum(found[state] for state in PAGE_STATES)
        moved = sum(finding.done and bool(finding.to) for finding in self.findings)
        states = ", ".join(f"{found[state]} {state}" for state in PAGE_STATES if found[state])
        said = [f"{text.count(pages, 'page')}: {states}" if pages else "no pages"]
        if found["orphan"]:
            said.append(f"{text.count(found['orphan'], 'file')} without a page")
        if staging:
            said.append(f"{text.count(len(staging), 'publication')} that cannot be completed")
        if moved:
            said.append(f"{moved} put aside, nothing was deleted")
        return said

    def _removed(self) -> list[str]:
        removed = [finding for finding in self.findings if finding.removes]
        if not removed:
            return ["nothing to remove"]
        n_bytes = text.size(sum(finding.n_bytes for finding in removed))
        return [f"{len(removed)} {'to be removed' if self.dry_run else 'removed'}, {n_bytes}"]


def fsck(
    ctx: typer.Context,
    directory: Directory = None,
    dry_run: DryRun = False,
    engine: Engine = None,
) -> None:
    """Check every page file; put aside what is damaged or belongs to no page.

    Finishes what was interrupted and verifies all checksums. What is good for nothing is moved to
    DIR/.quarantine, nothing is deleted; a page that lost only a part stays. Safe beside a running
    engine; needs no daemon and no model. A page is whole; plain, without a .ckpt that says what it
    is good for, so that nothing can be verified; degraded, without a part; or damaged. What is
    unknown is another program's or another version's. Exit codes: 0 nothing is damaged; 1 something
    is: degraded, damaged or an orphan; 2 usage, or not everything could be read or done.
    """
    _run(ctx.obj, "fsck", directory, dry_run, engine, ())


def gc(
    ctx: typer.Context,
    directory: Directory = None,
    dry_run: DryRun = False,
    days: PageDays = PAGE_DAYS,
    engine: Engine = None,
) -> None:
    """Remove what fsck put aside DAYS ago or earlier.

    Nothing is deleted that was not in DIR/.quarantine for so long. Finishes what was interrupted.
    Safe beside a running engine; needs no daemon and no model. Exit codes: 0 done; 2 usage, or not
    everything could be read or done.
    """
    _run(ctx.obj, "gc", directory, dry_run, engine, ("--days", str(days)))


def _run(
    output: Output,
    verb: str,
    directory: Path | None,
    dry_run: bool,
    engine: Path | None,
    options: Sequence[str],
) -> None:
    from llamactl_supervisor.errors import InvalidRequestError

    with connect(output) as client:
        desired = _desired(client)
        own = directory or _own_directory(desired) or client.paths.pages
    where = own.absolute()
    words = [str(_program(output, engine, desired)), verb, str(where), *options]
    if dry_run:
        words.append("--dry-run")
    findings, code = _findings(output, words)
    if [(finding.what, finding.name) for finding in findings] == [("failed", "")]:
        raise InvalidRequestError("page_files_unreadable", findings[0].why)
    output.emit(CheckView(verb, where, dry_run, findings))
    if code:
        raise typer.Exit(code)


def _desired(client: Client) -> UpRequest | None:
    """Return what the daemon's engine was asked to be; None without one or without a daemon."""
    from llamactl_supervisor.errors import DaemonUnreachableError

    try:
        return client.status().desired
    except DaemonUnreachableError:
        return None


def _own_directory(desired: UpRequest | None) -> Path | None:
    """Return the directory that the engine was given in its own words, None: llamactl's."""
    args = () if desired is None else desired.spec.extra_args
    given = [value for name, value in pairwise(args) if name.replace("_", "-") == PAGES_OPTION]
    if not given:
        return None
    if not Path(given[-1]).is_absolute():
        message = f"the engine's {PAGES_OPTION} {given[-1]} is relative to where it was started"
        raise typer.BadParameter(f"{message}; name the directory", param_hint="DIR")
    return Path(given[-1])


def _program(output: Output, engine: Path | None, desired: UpRequest | None) -> Path:
    """Return the program beside the given engine, the one that runs, or one that is built."""
    if engine is not None:
        given_engine(engine, "--engine")
        beside = engine.absolute().with_name(PROGRAM)
        if not beside.is_file():
            message = f"there is no {PROGRAM} beside {engine}"
            raise typer.BadParameter(message, param_hint="--engine")
        return beside
    if desired is not None:
        beside = Path(desired.engine_path).with_name(PROGRAM)
        if beside.is_file():
            return beside
    return Provider(output).program(PROGRAM)


def _findings(output: Output, words: list[str]) -> tuple[tuple[Finding, ...], int]:
    """Run the program; return what it found and its exit code."""
    from llamactl_supervisor.errors import FailedError

    with (
        output.activity("reading the files") as news,
        _terminating(),
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            encoding="utf-8",
        ) as child,
    ):  # fmt: skip
        try:
            findings = tuple(_told(child.stdout or (), news))
        except (ValueError, KeyError, TypeError) as exc:
            child.kill()
            raise FailedError("page_files_failed", f"{words[0]} wrote what makes no sense") from exc
        except BaseException:  # what nobody is told of is not done either
            child.kill()
            raise
        said = child.stderr.read().strip() if child.stderr else ""
    whole = child.returncode in {0, DAMAGED} or (child.returncode == INCOMPLETE and findings)
    if not whole:
        message = f"{' '.join(words)} ended with {child.returncode}"
        raise FailedError("page_files_failed", f"{message}: {said}" if said else message)
    return findings, child.returncode


@contextmanager
def _terminating() -> Iterator[None]:
    """End by an exception at TERM, so that the program does not go on by itself."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _told(lines: Iterable[str], news: Callable[[str], None]) -> Iterable[Finding]:
    """Yield the findings as they come; who waits is told at once, and when it is over."""
    for line in lines:
        finding = Finding.parse(line)
        if finding.what == WAITING:
            news(finding.why)
        else:
            news("")
            yield finding
