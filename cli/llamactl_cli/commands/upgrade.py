"""`llamactl upgrade`: the engine that runs becomes the newest build of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from llamactl_cli.commands.apply import AcceptLoss, ApplyView, Overcommit, carry_out
from llamactl_cli.connect import connect
from llamactl_cli.options import DryRun, Timeout
from llamactl_cli.provide import Provider
from llamactl_cli.views import end

if TYPE_CHECKING:
    from pathlib import Path

    from llamactl_supervisor.client import Client

    from llamactl_cli.output import Output


@dataclass(frozen=True)
class NewestView:
    """What an upgrade came to."""

    applied: ApplyView
    newest: Path

    def text(self) -> str:
        """Return what an apply of it says, or that there was none."""
        if self.applied.result.plan.action == "none":
            return f"already the newest: {self.newest}"
        return self.applied.text()

    def data(self) -> dict[str, Any]:
        """Return the result of the apply, and the newest build."""
        return self.applied.data() | {"newest": str(self.newest)}


def upgrade(
    ctx: typer.Context,
    dry_run: DryRun = False,
    overcommit: Overcommit = False,
    accept_loss: AcceptLoss = False,
    timeout: Timeout = None,
) -> None:
    """Build the newest engine if it is missing, and relaunch with it.

    An engine that is that build already is left as it is (exit 0). Refused where it is none of
    llamactl's own (exit 5): another binary is named by `llamactl apply --engine`.
    """
    from llamactl_supervisor.models import ApplyPlan, ApplyRequest, ApplyResult, EngineConfig

    output: Output = ctx.obj
    with connect(output) as client:
        known = _ours(client)
        newest = Provider(output).build().path
        view = ApplyView(ApplyResult(applied=False, plan=ApplyPlan(action="none")), dry_run)
        if newest != known:
            engine = EngineConfig(engine_path=str(newest))
            request = ApplyRequest(
                engine=engine, dry_run=dry_run, overcommit=overcommit, accept_loss=accept_loss
            )
            view = carry_out(client, request, output, timeout)
    output.emit(NewestView(view, newest))
    end(view.result.lifecycle, accept_loss=accept_loss)


def _ours(client: Client) -> Path:
    """Return the engine that is wanted; refuse where another one would take a stranger's place."""
    from pathlib import Path

    from llamactl_supervisor.errors import Code, error

    desired = client.status().desired
    if desired is None:
        raise error(Code.NO_SPEC, "no engine was asked for yet", hint="use `llamactl up`")
    path = Path(desired.engine_path)
    if not path.is_relative_to(client.paths.cache):
        raise error(
            Code.APPLY_REFUSED,
            f"{path} was not built by llamactl: a build of ours may lack what it has",
            hint="name the new one: `llamactl apply --engine PATH`",
        )
    return path
