"""`llamactl run` under those who start llama-server: not one line of theirs is another."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

import httpx
import pytest
from llamactl_supervisor.models import EngineState
from orchestrators import UNLOAD_S, Entry, LlamaSwap
from run_box import COMMAND, RunBox, healthy, owner_pid
from sandbox import FAKE_ENGINE, WITHIN_S, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT, LONG = ("-c", "8192"), ("-c", "32768")
TIMES = 4


@pytest.fixture
def box() -> Iterator[RunBox]:
    box = RunBox()
    box.start()
    yield box
    box.close()


def entry(box: RunBox, *args: str, port: int | None = None) -> Entry:
    port = free_port() if port is None else port
    server = (str(FAKE_ENGINE), "-m", str(box.model), "--port", str(port), *args)
    return Entry((*COMMAND, "--", *server), port)


@pytest.fixture
def swap(box: RunBox) -> Iterator[LlamaSwap]:
    entries = {"short": entry(box, *SHORT), "long": entry(box, *LONG)}
    swap = LlamaSwap(entries, os.environ | box.env, box.root)
    yield swap
    swap.close()


def n_ctx(url: str) -> int:
    return told(httpx.get(f"{url}/props", timeout=WITHIN_S))


def told(answer: httpx.Response) -> int:
    """Return the context that an answer of /props tells."""
    found: int = answer.raise_for_status().json()["context_geometry"]["n_ctx"]
    return found


def test_two_entries_of_one_file_are_one_load(box: RunBox, swap: LlamaSwap) -> None:
    """Each with a port of its own; never is a 200 from the geometry before taken for the new."""
    for _ in range(TIMES):
        assert told(swap.ask("short")) == 8192
        assert told(swap.ask("long")) == 32768
    assert box.loads() == ["run"]
    assert box.left() == ["taken"] * (2 * TIMES - 1)
    assert not any(each.killed for each in swap.entries.values())


def test_an_entry_ends_long_before_it_would_be_killed(box: RunBox, swap: LlamaSwap) -> None:
    """Its output is closed as well: a grandchild that kept it open would cost ten seconds more."""
    swap.ask("short")
    began = time.monotonic()
    swap.end(swap.entries["short"])
    assert time.monotonic() - began < UNLOAD_S / 2
    assert box.client.status().state is EngineState.READY


def test_a_server_that_starts_before_the_old_one_has_ended_waits_for_it(
    box: RunBox, swap: LlamaSwap
) -> None:
    """As after a reload of the configuration, at the very same port."""
    swap.ask("short")
    old = swap.entries["short"]
    assert old.process is not None
    fresh = entry(box, *LONG, port=old.port)
    new = subprocess.Popen(fresh.command, env=os.environ | box.env, cwd=box.root)
    try:
        assert n_ctx(old.url) == 8192
        os.killpg(old.process.pid, signal.SIGTERM)
        until(lambda: owner_pid(box) == new.pid)
        until(lambda: healthy(fresh.url))
        assert n_ctx(fresh.url) == 32768
        assert box.loads() == ["run"]
    finally:
        new.kill()
        new.wait(WITHIN_S)


def owns(box: RunBox, pid: int) -> bool:
    return owner_pid(box) == pid


def test_a_shell_loop(box: RunBox) -> None:
    """The same command line again and again, and the weights are loaded once."""
    port = free_port()
    server = " ".join([*COMMAND, "--", str(FAKE_ENGINE), "-m", str(box.model)])
    script = f"""
        for n in 8192 16384 8192; do
            {server} --port {port} -c $n & p=$!
            until curl -sfo /dev/null http://127.0.0.1:{port}/health; do :; done
            curl -s http://127.0.0.1:{port}/props | tr , '\\n' | grep -m 1 -o 'n_ctx": [0-9]*'
            kill $p; wait $p; echo "ended $?"
        done 2> {box.root}/loop.err
    """
    done = subprocess.run(
        ["bash", "-c", script],
        env=os.environ | box.env,
        cwd=box.root,
        capture_output=True,
        text=True,
        check=True,
        timeout=WITHIN_S * 2,
    )
    said = [line.rpartition(" ")[2] for line in done.stdout.splitlines()]
    assert said == ["8192", "0", "16384", "0", "8192", "0"]
    assert box.loads() == ["run"]


def test_a_manager_that_sends_term_and_starts_the_next_at_once(box: RunBox) -> None:
    """It does not wait for the end of the one before, and all have one port."""
    port = free_port()
    env = os.environ | box.env
    running: list[subprocess.Popen[bytes]] = []
    for number in range(TIMES):
        if running:
            running[-1].terminate()
        args = (LONG, SHORT)[number % 2]
        running.append(
            subprocess.Popen(entry(box, *args, port=port).command, env=env, cwd=box.root)
        )
        last = running[-1].pid
        until(partial(owns, box, last))
        until(partial(healthy, f"http://127.0.0.1:{port}"))
    try:
        assert [each.wait(WITHIN_S) for each in running[:-1]] == [0] * (TIMES - 1)
        assert n_ctx(f"http://127.0.0.1:{port}") == 8192
        assert box.loads() == ["run"]
    finally:
        running[-1].kill()
        running[-1].wait(WITHIN_S)
