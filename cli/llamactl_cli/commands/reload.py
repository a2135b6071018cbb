"""`llamactl reload`: the daemon reads its configuration again and follows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llamactl_cli import text, waiting
from llamactl_cli.options import RECONFIGURE_TIMEOUT_S, ReconfigureTimeout
from llamactl_cli.views import ReceiptView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.client import Client
    from llamactl_supervisor.models import FieldChange, ReloadResult, RunningConfig

    from llamactl_cli.output import Output


@dataclass(frozen=True)
class ReloadView:
    """What came into force, what waits for a restart, and the engine's receipt.

    `overruled` are keys of the file that the daemon has from elsewhere, with where that is.
    """

    result: ReloadResult
    overruled: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Return a line for each field, then the receipt."""
        result = self.result
        rows = [
            ("reloaded", "nothing in the configuration has changed" if result.unchanged else None),
            *(("in force", _change(change)) for change in result.applied),
            *(("needs restart", _change(change)) for change in result.needs_restart),
            *(
                ("overruled", f"{key}: the daemon has it by its own {pin}, whatever the file says")
                for key, pin in self.overruled.items()
            ),
        ]
        receipt = [] if result.receipt is None else ["", ReceiptView(result.receipt).text()]
        return "\n".join([text.table(rows), *receipt])

    def data(self) -> dict[str, Any]:
        """Return the result as the daemon gave it."""
        return self.result.model_dump(mode="json") | {"overruled": dict(self.overruled)}


def reload(
    ctx: typer.Context,
    timeout: ReconfigureTimeout = RECONFIGURE_TIMEOUT_S,
) -> None:
    """Have the daemon read its configuration again.

    Context and slots change live; what needs a restart is named and left alone. A broken file and
    a change that the engine declines are refused (exit 5); the old configuration stays in force.
    """
    from llamactl_supervisor.models import ReloadResult

    output: Output = ctx.obj
    with _client() as client:
        result = waiting.follow(
            client,
            client.reload(),
            output,
            ReloadResult,
            doing="reading the configuration",
            timeout_s=timeout,
        )
        overruled = _overruled(client.config())
    output.emit(ReloadView(result, overruled))


def _client() -> Client:
    """Return the client; a file too broken to find the daemon by is a reload refused as well."""
    from llamactl_supervisor.client import Client
    from llamactl_supervisor.config import config_refused
    from llamactl_supervisor.errors import Code, LlamactlError

    try:
        return Client()
    except LlamactlError as exc:
        broken = exc.code in {Code.CONFIG_INVALID, Code.CONFIG_INSECURE}
        raise (config_refused(exc) if broken else exc) from None


def _overruled(running: RunningConfig) -> dict[str, str]:
    """Return the keys that the daemon's file has and its environment or a flag sets, with which."""
    from llamactl_supervisor.config import read
    from llamactl_supervisor.errors import LlamactlError

    try:
        tables = {} if running.file is None else read(Path(running.file)).tables
    except LlamactlError:
        return {}
    return {
        key: value.pinned
        for key, value in running.values.items()
        if value.pinned is not None and _has(tables, *key.split("."))
    }


def _has(tables: Mapping[str, Any], section: str, name: str) -> bool:
    table = tables.get(section)
    return isinstance(table, dict) and name in table


def _change(change: FieldChange) -> str:
    return f"{change.field}: {text.value(change.before)} -> {text.value(change.after)}"
