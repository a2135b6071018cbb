"""Those who start llama-server, as they do it: llama-swap's protocol, and a process manager's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import httpx
from sandbox import WITHIN_S, until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FIRST_POLL_S = 0.25
POLL_S = 1.0
UNLOAD_S = 10.0
"""From the TERM to the KILL of a process group."""


def passed(moment_s: float) -> bool:
    """Whether the moment of the monotonic clock has passed."""
    return time.monotonic() >= moment_s


@dataclass
class Entry:
    """One model of the configuration: a command line, and a port that is its own for ever."""

    command: tuple[str, ...]
    port: int
    process: subprocess.Popen[bytes] | None = None
    killed: bool = False

    @property
    def url(self) -> str:
        """Where its clients are sent."""
        return f"http://127.0.0.1:{self.port}"


class LlamaSwap:
    """Starts an entry when it is asked for, and ends the one that is running first.

    It polls /health for the first time 250 ms after a start and then each second, sends TERM to the
    process group, and KILL ten seconds later. The output goes to pipes that it reads to their end.
    """

    def __init__(self, entries: Mapping[str, Entry], env: Mapping[str, str], cwd: Path) -> None:
        self.entries, self._env, self._cwd = entries, env, cwd
        self.polls: list[tuple[str, int]] = []
        """Of every entry, each status that its /health was seen with while it started."""

    def ask(self, name: str) -> httpx.Response:
        """Pass a request on to the entry, and return its answer."""
        for other, entry in self.entries.items():
            if other != name:
                self.end(entry)
        entry = self.entries[name]
        if entry.process is None or entry.process.poll() is not None:
            self.start(name)
        return httpx.get(f"{entry.url}/props", timeout=WITHIN_S)

    def start(self, name: str) -> None:
        """Start the entry; return once it is healthy."""
        entry = self.entries[name]
        entry.process = subprocess.Popen(
            entry.command,
            env=dict(self._env),
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        due = time.monotonic() + FIRST_POLL_S
        while True:
            until(partial(passed, due))
            assert entry.process.poll() is None, entry.process.communicate()[0].decode()
            status = 0
            with contextlib.suppress(httpx.TransportError):
                status = httpx.get(f"{entry.url}/health", timeout=WITHIN_S).status_code
            self.polls.append((name, status))
            if status == 200:
                return
            assert len(self.polls) < WITHIN_S / POLL_S, "it never becomes healthy"
            due += POLL_S

    def end(self, entry: Entry) -> None:
        """End the entry, and return once it is gone and has closed its output."""
        process, entry.process = entry.process, None
        if process is None:
            return
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=UNLOAD_S)
        except subprocess.TimeoutExpired:
            entry.killed = True
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def close(self) -> None:
        """End every entry."""
        for entry in self.entries.values():
            self.end(entry)
