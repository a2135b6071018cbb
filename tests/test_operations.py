"""An operation ends once, and is remembered for a while."""

from __future__ import annotations

import asyncio

import pytest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import (
    LifecycleOutcome,
    LifecycleResult,
    Operation,
    OperationKind,
    OperationState,
    Problem,
)
from llamactl_supervisor.operations import HISTORY_MAX, Operations

DONE = LifecycleResult(outcome=LifecycleOutcome.STOPPED)


def test_a_waiter_gets_the_end_or_the_present() -> None:
    async def scenario() -> tuple[Operation, Operation]:
        operations = Operations()
        name = operations.create(OperationKind.STOP, "me").id
        operations.progress(name, "the engine is stopping")
        early = await operations.wait(name, 0.01)
        waiter = asyncio.create_task(operations.wait(name, 60))
        await asyncio.sleep(0)
        operations.end(name, DONE)
        return early, await waiter

    early, late = asyncio.run(scenario())
    assert (early.state, early.progress) == (OperationState.RUNNING, "the engine is stopping")
    assert (late.state, late.result, late.error) == (OperationState.SUCCEEDED, DONE, None)
    assert late.finished_at is not None


def test_a_problem_is_a_failed_end() -> None:
    operations = Operations()
    name = operations.create(OperationKind.UP, "me").id
    assert operations.running() == operations.get(name)
    ended = operations.end(name, Problem(code="port_in_use", message="taken"))
    assert (ended.state, ended.result) == (OperationState.FAILED, None)
    assert operations.running() is None


def test_a_page_verb_is_shown_where_nothing_else_runs() -> None:
    operations = Operations()
    page = operations.create(OperationKind.PAGE_OUT, "me").id
    assert operations.running() == operations.get(page)
    change = operations.create(OperationKind.RECONFIGURE, "me").id
    operations.create(OperationKind.STOP, "me")
    assert operations.running() == operations.get(change)


def test_the_history_is_bounded_and_forgets_the_oldest() -> None:
    operations = Operations()
    running = operations.create(OperationKind.UP, "me").id
    names = [operations.create(OperationKind.STOP, "me").id for _ in range(HISTORY_MAX + 5)]
    for name in names:
        operations.end(name, DONE)
    assert operations.get(running).state is OperationState.RUNNING
    assert operations.get(names[5]).state is OperationState.SUCCEEDED
    with pytest.raises(LlamactlError) as caught:
        operations.get(names[4])
    assert caught.value.code == "not_found"


def test_a_down_is_told_before_the_daemon_goes() -> None:
    async def scenario() -> None:
        operations = Operations()
        asked = operations.create(OperationKind.DOWN, "me").id
        by_signal = operations.create(OperationKind.DOWN, "SIGTERM").id
        operations.nobody_asks(by_signal)
        for name in (asked, by_signal):
            operations.end(name, DONE)
        told = asyncio.create_task(operations.told(60))
        await asyncio.sleep(0)
        assert not told.done()
        await operations.wait(asked, 60)
        await asyncio.wait_for(told, 30)

    asyncio.run(scenario())
