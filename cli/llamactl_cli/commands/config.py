"""`llamactl config`: what is configured and by whom, whether a file is right, and every key."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from llamactl_supervisor.errors import Code, error

from llamactl_cli import in_force, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.config import Key, Loaded
    from llamactl_supervisor.errors import LlamactlError
    from llamactl_supervisor.models import RunningConfig, Takes

    from llamactl_cli.output import Output

DOCS_HEAD = """\
# Configuration

One TOML file: the one that `llamactl serve --config FILE` or `LLAMACTL_CONFIG` names, else
`config.toml` in `$XDG_CONFIG_HOME/llamactl` (`~/.config/llamactl`), else
`/etc/llamactl/config.toml`. It belongs to root or to you, and nobody else can write it. A flag wins
over the environment, that over the file, that over the default. The unit ends a name: `_s` is
seconds, `_bytes` bytes. A path in the file is relative to the file.

A changed value is read by `llamactl reload`, or at once under `llamactl serve --watch`. The column
*in force* says what it takes then. *live*: nothing more. *engine*: the engine's next start, which
`--watch` brings about at once; so it is where a live value leaves the choice to the engine (`auto`,
none). *daemon*: the daemon's next start.

`llamactl config show` prints each value and where it comes from. `llamactl config check FILE` says
whether a file is right.

Generated: `llamactl config docs`."""
DOCS_COLUMNS = (
    "| key | values | default | environment | in force | meaning |",
    "|---|---|---|---|---|---|",
)
IN_FORCE = {"reload": "live", "engine_restart": "engine", "daemon_restart": "daemon"}
"""What a changed value takes, in a word."""


@dataclass(frozen=True)
class ShowView:
    """Every value, its source and its meaning; only what somebody has set if `changed`.

    `daemon` is what the one that runs has; None without one.
    """

    loaded: Loaded
    meanings: Mapping[str, str]
    daemon: RunningConfig | None
    changed: bool
    wide: bool = False

    def text(self) -> str:
        """Return a table, and below it where the daemon goes by something else.

        One that is not `wide` has 80 columns and names the file below.
        """
        table = self._wide() if self.wide else self._narrow()
        return f"{table}\n{in_force.told(self.loaded, self.daemon)}"

    def _wide(self) -> str:
        rows = [
            (key, text.value(value.value), value.source, self.meanings[key])
            for key, value in self.loaded.values.items()
            if not (self.changed and value.is_default)
        ]
        return text.columns(("KEY", "VALUE", "SOURCE", "MEANING"), rows)

    def _narrow(self) -> str:
        shown = {
            key: (text.printable(text.value(value.value)), value.source.partition(" ")[0])
            for key, value in self.loaded.values.items()
            if not (self.changed and value.is_default)
        }
        taken = max(map(len, shown), default=0) + len("default") + 2 * len(text.COLUMN_GAP)
        rows = [
            (key, text.middle(value, text.SCREEN_COLUMNS - taken), source)
            for key, (value, source) in shown.items()
        ]
        table = text.columns(("KEY", "VALUE", "SOURCE"), rows)
        return table if self.loaded.file is None else f"{table}\nfile: {self.loaded.file}"

    def data(self) -> dict[str, Any]:
        """Return the file that was read, the values by key, and the daemon that runs or null.

        `left_out` are sections of the file that are not for an instance.
        The daemon has, by key, what it goes by instead (`running`) and `why`.
        """
        values = {
            key: {"value": value.value, "source": value.source, "meaning": self.meanings[key]}
            for key, value in self.loaded.values.items()
            if not (self.changed and value.is_default)
        }
        file, daemon = self.loaded.file, self.daemon
        others = {} if daemon is None else in_force.differing(self.loaded, daemon)
        told = {key: {"running": other.running, "why": other.why} for key, other in others.items()}
        return {
            "file": None if file is None else str(file),
            "left_out": list(self.loaded.left_out),
            "values": values,
            "daemon": daemon and {"pid": daemon.pid, "file": daemon.file, "differs": told},
        }


@dataclass(frozen=True)
class CheckView:
    """A file that is right; None: there is none, and the defaults hold.

    `environment` has each variable that sets something, and the key that it sets.
    """

    file: Path | None
    environment: Mapping[str, str]

    def text(self) -> str:
        """Return a line for the file, and one for each variable."""
        none = "there is no file; the defaults hold"
        lines = [none if self.file is None else f"{self.file}: ok"]
        return "\n".join(
            lines + [f"environment: {name} sets {key}" for name, key in self.environment.items()]
        )

    def data(self) -> dict[str, Any]:
        """Return the same."""
        file = None if self.file is None else str(self.file)
        return {"file": file, "ok": True, "environment": dict(self.environment)}


@dataclass(frozen=True)
class DocsView:
    """Every key there is, with its meaning and what a changed value takes."""

    keys: tuple[Key, ...]
    meanings: Mapping[str, str]
    takes: Mapping[str, Takes]

    def text(self) -> str:
        """Return a document in Markdown: a table for each section."""
        lines = [DOCS_HEAD]
        for section, keys in groupby(self.keys, lambda key: key.section):
            lines += [f"\n## [{section}]\n", *DOCS_COLUMNS, *map(self._row, keys)]
        return "\n".join(lines)

    def _row(self, key: Key) -> str:
        default = "" if key.default is None else f"`{_toml(key.default)}`"
        cells = (f"`{key.name}`", key.allowed, default, f"`{key.env}`")
        takes = IN_FORCE[self.takes[key.name]]
        return f"| {' | '.join((*cells, takes, self.meanings[key.name]))} |"

    def data(self) -> dict[str, Any]:
        """Return the same by key."""
        return {
            key.name: {
                "values": key.allowed,
                "default": key.default,
                "environment": key.env,
                "takes": self.takes[key.name],
                "meaning": self.meanings[key.name],
            }
            for key in self.keys
        }


def show(
    ctx: typer.Context,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what is not left at its default.")
    ] = False,
    wide: Annotated[
        bool, typer.Option("--wide", help="Whole values and sources, and what each key means.")
    ] = False,
) -> None:
    """Show every value and where it comes from; with --wide or --json also what it means.

    As a daemon would have it that is started by this shell now. Where one runs that goes by
    something else, that is shown below, and what it takes: a reload, a restart, or nothing, where
    `up` or `reconfigure` asked for it. Exit 2: the file or the environment makes no sense.
    """
    from llamactl_supervisor.config import load

    output: Output = ctx.obj
    loaded = load()
    output.emit(ShowView(loaded, _meanings(), _daemon(loaded, output), changed, wide))


def check(
    ctx: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Instead of the one in use.")
    ] = None,
    syntax: Annotated[
        bool, typer.Option("--syntax", help="Only that: the file is for another machine.")
    ] = False,
) -> None:
    """Check a configuration file, and the environment, without using them.

    First whether they make sense, then, unless --syntax, whether this machine has what they
    name: files, programs, addresses. Exit 0: all is right; 2: it is not, and the error says where:
    in the file, a variable with our prefix that sets nothing, or on this machine.
    """
    from llamactl_supervisor import groundwork
    from llamactl_supervisor.config import load, mistyped, mistyped_message

    from llamactl_cli.provide import unnamed_engine

    output: Output = ctx.obj
    loaded = load(file=file)
    _ = loaded.paths
    if slips := mistyped(loaded.env):
        told = "; ".join(mistyped_message(name, nearest) for name, nearest in slips.items())
        raise error(Code.INVALID_REQUEST, f"environment: {told}", details={"mistyped": slips})
    setting = {
        value.source.removeprefix("env "): key
        for key, value in loaded.values.items()
        if value.source.startswith("env ")
    }
    if not syntax and (lacking := groundwork.problems(loaded, unnamed_engine(loaded))):
        raise _lacking(lacking)
    output.emit(CheckView(loaded.file, setting))


def _lacking(found: list[LlamactlError]) -> LlamactlError:
    """Return what this machine has not, as one error: the hint is of the first."""
    told = "; ".join(each.message for each in found)
    problems = [{"code": e.code, "message": e.message, "hint": e.hint} for e in found]
    message = f"it makes sense, but not on this machine: {told}"
    return error(Code.CONFIG_INVALID, message, hint=found[0].hint, details={"problems": problems})


def docs(ctx: typer.Context) -> None:
    """Print every key in Markdown: values, default, environment variable, what a change takes."""
    from llamactl_supervisor.config import Config, keys, takes

    output: Output = ctx.obj
    every = tuple(keys(Config))
    taken = {key.name: takes(key.section, key.field) for key in every}
    output.emit(DocsView(every, _meanings(), taken))


def _daemon(loaded: Loaded, output: Output) -> RunningConfig | None:
    """Return what the daemon of these directories has; None for none, or one that does not say."""
    from llamactl_supervisor.client import Client
    from llamactl_supervisor.errors import DaemonUnreachableError, LlamactlError

    try:
        with Client(loaded.paths) as client:
            return client.config()
    except LlamactlError as exc:
        if not isinstance(exc, DaemonUnreachableError) or "pid" in exc.details:
            output.say(f"what the daemon goes by is not known: {exc.message}")
        return None


def _meanings() -> dict[str, str]:
    """Return what each key means: the docstring below the field, on one line."""
    from llamactl_supervisor.config import Config, keys

    return {
        key.name: _docstrings(Config.model_fields[key.section].annotation).get(key.field, "")
        for key in keys(Config)
    }


def _docstrings(table: Any) -> dict[str, str]:
    """Return the docstrings of a class's fields; those of its bases are in their own source."""
    found: dict[str, str] = {}
    for cls in reversed(table.__mro__):
        if cls.__module__.partition(".")[0] != "llamactl_supervisor":
            continue
        body = ast.parse(inspect.getsource(cls)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, doc in zip(body.body, body.body[1:], strict=False):
            match field, doc:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(said))
                ):
                    found[name] = " ".join(said.split())
    return found


def _toml(value: Any) -> str:
    return json.dumps(value)
