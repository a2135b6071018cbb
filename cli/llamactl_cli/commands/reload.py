"""`llamactl reload`: the daemon reads its configuration again and follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamactl_cli import text, waiting
from llamactl_cli.options import RECONFIGURE_TIMEOUT_S
from llamactl_cli.options import timeout as timeout_s
from llamactl_cli.views import ReceiptView

if TYPE_CHECKING:
    from llamactl_supervisor.client import ControlClient
    from llamactl_supervisor.models import FieldChange, ReloadResult

    from llamactl_cli.output import Output


@dataclass(frozen=True)
class ReloadView:
    """What came into force, what waits for a restart, and the engine's receipt."""

    result: ReloadResult

    def text(self) -> str:
        """Return a line for each field, then the receipt."""
        result = self.result
        rows = [
            ("reloaded", "nothing in the configuration has changed" if result.unchanged else None),
            *(("in force", _change(change)) for change in result.applied),
            *(("needs restart", _change(change)) for change in result.needs_restart),
        ]
        receipt = [] if result.receipt is None else ["", ReceiptView(result.receipt).text()]
        return "\n".join([text.table(rows), *receipt])

    def data(self) -> dict[str, Any]:
        """Return the result as the daemon gave it."""
        return self.result.model_dump(mode="json")


def reload(
    ctx: typer.Context,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            parser=timeout_s,
            metavar="SECONDS",
            help="How long to wait for the end; a long prompt delays the safe point.",
        ),
    ] = RECONFIGURE_TIMEOUT_S,
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
    output.emit(ReloadView(result))


def _client() -> ControlClient:
    """Return the client; a file too broken to find the daemon by is a reload refused as well."""
    from llamactl_supervisor.client import ControlClient
    from llamactl_supervisor.config import config_refused
    from llamactl_supervisor.errors import Code, LlamactlError

    try:
        return ControlClient()
    except LlamactlError as exc:
        broken = exc.code in {Code.CONFIG_INVALID, Code.CONFIG_INSECURE}
        raise (config_refused(exc) if broken else exc) from None


def _change(change: FieldChange) -> str:
    return f"{change.field}: {text.value(change.before)} -> {text.value(change.after)}"
