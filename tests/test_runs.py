"""What the daemon keeps of a run that is connected, without a daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING
from uuid import uuid4

from llamactl_supervisor import events as ev
from llamactl_supervisor.models import ProcessContext, RunMessage, RunRequest
from llamactl_supervisor.paths import Paths
from llamactl_supervisor.runs import Runs
from llamactl_supervisor.settings import Settings
from llamactl_supervisor.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamactl_supervisor.models import Operation, OperationKind

ASKED = RunRequest(
    argv=(),
    host="127.0.0.1",
    port=8080,
    instance_id="one",
    context=ProcessContext(cwd="/", affinity=(0,)),
)
TURNS = 20


def test_who_hangs_up_leaves_no_task_behind() -> None:
    """It listens, and is gone in the middle of that: what waited for its next message ends too."""
    posted: list[ev.Event] = []

    async def submit(_: OperationKind, __: str, command: Callable[[str], ev.Command]) -> Operation:
        command("run")
        return None  # type: ignore[return-value]

    async def run() -> set[asyncio.Task[object]]:
        snapshot = Snapshot(seed=uuid4(), settings=Settings())
        paths = Paths.from_env({"LLAMACTL_RUNTIME_DIR": "/r"})
        runs = Runs(paths, lambda: snapshot, lambda: None, submit, posted.append)
        stream = runs.serve(ASKED, os.getpid())
        assert b'"accepted"' in await anext(stream)
        runs.tell("run", RunMessage(event="notice", text="wait"))
        assert b'"wait"' in await anext(stream)
        listening = asyncio.ensure_future(anext(stream))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(run()) == set()
    assert posted == [ev.Left("run")]
