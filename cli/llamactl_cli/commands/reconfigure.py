"""`llamactl reconfigure`: another context size or slot count on the loaded weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from llamactl_cli import waiting
from llamactl_cli.connect import connect
from llamactl_cli.options import (
    RECONFIGURE_TIMEOUT_S,
    DryRun,
    KvUnified,
    NCtx,
    NSeq,
    PerSlot,
    ReconfigureTimeout,
    one_size,
    total_tokens,
)
from llamactl_cli.views import ReceiptView

if TYPE_CHECKING:
    from llamactl_supervisor.client import Client

    from llamactl_cli.output import Output


def reconfigure(
    ctx: typer.Context,
    n_ctx: NCtx = None,
    n_seq: NSeq = None,
    per_slot: PerSlot = None,
    kv_unified: KvUnified = None,
    dry_run: DryRun = False,
    timeout: ReconfigureTimeout = RECONFIGURE_TIMEOUT_S,
) -> None:
    """Change context size or slot count live.

    Conversations and running generations go on. What is left out keeps its effective value.
    Prints the engine's receipt.
    """
    from llamactl_supervisor.errors import Code, error
    from llamactl_supervisor.models import Receipt

    output: Output = ctx.obj
    if n_ctx is n_seq is per_slot is kv_unified is None:
        hint = "give at least one of --n-ctx, --n-seq, --per-slot, --kv-unified, --no-kv-unified"
        raise error(Code.INVALID_REQUEST, "nothing to change was given", hint=hint)
    one_size(n_ctx, per_slot)
    with connect(output) as client:
        if per_slot is not None:
            n_ctx = total_tokens(per_slot, n_seq or _n_seq(client))
        operation = client.reconfigure(
            n_ctx=n_ctx, n_seq=n_seq, kv_unified=kv_unified, dry_run=dry_run
        )
        doing = "waiting for the engine's plan" if dry_run else "changing the geometry"
        receipt = waiting.follow(client, operation, output, Receipt, doing=doing, timeout_s=timeout)
    output.emit(ReceiptView(receipt))


def _n_seq(client: Client) -> int:
    """Return how many slots the engine has now."""
    from llamactl_supervisor.errors import Code, error

    engine = client.status().engine
    if engine is None or engine.geometry is None:
        message = "there is no running engine whose slots could be counted"
        raise error(Code.ENGINE_STOPPED, message, hint="use `llamactl start`")
    return engine.geometry.n_seq
