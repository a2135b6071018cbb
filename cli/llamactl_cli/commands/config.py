"""`llamactl config`: what is configured and by whom, whether a file is right, and every key."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from llamactl_supervisor.errors import Code, error

from llamactl_cli import text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.config import Key, Loaded

    from llamactl_cli.output import Output


@dataclass(frozen=True)
class ShowView:
    """Every value, its source and its meaning; only what somebody has set if `changed`."""

    loaded: Loaded
    meanings: Mapping[str, str]
    changed: bool
    wide: bool = False

    def text(self) -> str:
        """Return a table; one that is not `wide` has 80 columns and names the file below."""
        if not self.wide:
            return self._narrow()
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
        """Return the file that was read, and the values by key."""
        values = {
            key: {"value": value.value, "source": value.source, "meaning": self.meanings[key]}
            for key, value in self.loaded.values.items()
            if not (self.changed and value.is_default)
        }
        file = self.loaded.file
        return {"file": None if file is None else str(file), "values": values}


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
    """Every key there is."""

    keys: tuple[Key, ...]
    meanings: Mapping[str, str]

    def text(self) -> str:
        """Return a Markdown table."""
        lines = ["| key | values | default | environment | meaning |", "|---|---|---|---|---|"]
        for key in self.keys:
            default = "" if key.default is None else f"`{_toml(key.default)}`"
            meaning = self.meanings[key.name]
            cells = (f"`{key.name}`", key.allowed, default, f"`{key.env}`", meaning)
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """Return the same by key."""
        return {
            key.name: {
                "values": key.allowed,
                "default": key.default,
                "environment": key.env,
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

    As this shell has it: a daemon that runs has what it read when it was started or reloaded.
    """
    from llamactl_supervisor.config import load

    output: Output = ctx.obj
    output.emit(ShowView(load(), _meanings(), changed, wide))


def check(
    ctx: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Instead of the one in use.")
    ] = None,
) -> None:
    """Check a configuration file, and the environment, without using them.

    Exit 0: all is right; 2: it is not, and the error says where: in the file, or a variable with
    our prefix that sets nothing.
    """
    from llamactl_supervisor.config import load, mistyped, mistyped_message

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
    output.emit(CheckView(loaded.file, setting))


def docs(ctx: typer.Context) -> None:
    """Print every key, its values, default and environment variable as a Markdown table."""
    from llamactl_supervisor.config import Config, keys

    output: Output = ctx.obj
    output.emit(DocsView(tuple(keys(Config)), _meanings()))


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
