"""What is asked of an engine that is measured: conversations of a given length, and a neighbour."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from llamactl_validate.engine import Engine
from llamactl_validate.expecting import Failed, Skipped, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from llamactl_validate.asked import Json

OPTIONS = ("--cache-ram", "0")
"""Of every engine: a cache of old prompts would answer for what is measured."""
PATIENCE_S = 1800.0
"""For a long prompt on a slow machine."""
FIRST_CHUNKS = 8
"""Of a neighbour, before it is in its stride."""
QUIET_S, QUIET_CHUNKS = 0.4, 100
"""How long a neighbour is watched undisturbed before each operation, at most."""
POLL_S = 0.001
BLOCK = 2**20


@contextmanager
def engine(program: Path, model: Path, n_ctx: int, n_seq: int, *more: str) -> Iterator[Engine]:
    """Yield an engine that has loaded its model, as urgent as this command itself."""
    geometry = ("--ctx-size", str(n_ctx), "--parallel", str(n_seq))
    live = Engine(program, model, *OPTIONS, *geometry, *more, patience_s=PATIENCE_S, idle=False)
    try:
        yield live
    finally:
        live.close()


def stop(live: Engine) -> None:
    """End it as whoever runs a server does: by SIGTERM."""
    live.process.terminate()
    try:
        live.process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise Failed("the engine does not end by SIGTERM") from None


def vocabulary(live: Engine) -> int:
    """Return how many tokens the model knows."""
    n: int = live.http.get("/v1/models").raise_for_status().json()["data"][0]["meta"]["n_vocab"]
    return n


def prompt_of(n_tokens: int, seed: int, n_vocab: int) -> list[int]:
    """Return tokens that no conversation of another seed begins with."""
    first = min(200, n_vocab // 4)
    n = min(4000, n_vocab - first)
    return [first + (seed * 7919 + 31 * i + i * i % 97) % n for i in range(n_tokens)]


def complete(live: Engine, slot: int, prompt: Sequence[int], n_predict: int) -> Json:
    """Return the `timings` of an answer in this slot."""
    answer = live.ask(
        "/completion",
        prompt=prompt,
        n_predict=n_predict,
        id_slot=slot,
        temperature=0,
        ignore_eos=True,
        cache_prompt=True,
    )
    timings: Json = answer.receipt["timings"]
    return timings


def converse(live: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Have each slot hold a conversation."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda slot: complete(live, slot, prompts[slot], 1), range(len(prompts))))


def milliseconds(action: Callable[[], object]) -> float:
    """Return how long an action takes."""
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e3


class Copy:
    """A copy of so many bytes within memory that is resident."""

    def __init__(self, n_bytes: int) -> None:
        self._from = memoryview(bytearray(b"\1" * n_bytes))
        self._to = memoryview(bytearray(b"\2" * n_bytes))

    def ms(self) -> float:
        """Return how long one takes."""

        def copy() -> None:
            self._to[:] = self._from

        return milliseconds(copy)


def written_ms(path: Path, n_bytes: int) -> float:
    """Return how long it takes to write a file of so many bytes and have it on the disk."""
    block = os.urandom(min(n_bytes, BLOCK))

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for start in range(0, n_bytes, BLOCK):
                file.write(block[: n_bytes - start])
            os.fsync(file)

    return milliseconds(write)


class Neighbour:
    """A generation in a slot of its own, and when each of its tokens came."""

    def __init__(self, live: Engine, slot: int, prompt: Sequence[int]) -> None:
        body: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": -1,
            "stream": True,
            "id_slot": slot,
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 0,
            "sse_ping_interval": -1,
        }
        content = json.dumps(body).encode()
        head = (
            f"POST /completion HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._live, self._slot = live, slot
        self.came: list[float] = []
        self._ended = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._socket.connect(str(live.socket))
        self._socket.sendall(head.encode() + content)
        self._thread.start()

    def _watch(self) -> None:
        # Bytes are not looked at: who measures takes as little as can be from who decodes.
        with suppress(OSError):
            while self._socket.recv(1 << 16):
                self.came.append(time.perf_counter())
        self._ended.set()

    def __enter__(self) -> Neighbour:
        try:
            until("a neighbour writes", lambda: self._wrote(FIRST_CHUNKS), within_s=PATIENCE_S)
        except BaseException:
            self._hang_up()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()
        if self._live.lives:
            until("a neighbour's slot is free", self._is_free, within_s=PATIENCE_S)

    def _is_free(self) -> bool:
        return not self._live.slots()[self._slot]["is_processing"]

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _wrote(self, n_chunks: int) -> bool:
        if self._ended.is_set():
            raise Skipped("a neighbour filled its context before the end, or was cut off")
        return len(self.came) >= n_chunks

    def rest(self) -> None:
        """Let it write undisturbed, for `QUIET_S` or `QUIET_CHUNKS`, but for some gaps at least."""
        began, before = time.perf_counter(), len(self.came)
        while (n := len(self.came) - before) < QUIET_CHUNKS:
            if n >= FIRST_CHUNKS and time.perf_counter() - began >= QUIET_S:
                break
            self._wrote(0)
            time.sleep(10 * POLL_S)

    def wrote_after(self, moment: float) -> None:
        """Wait for the first token after a moment."""
        while self.came[-1] < moment:
            self._wrote(0)
            time.sleep(POLL_S)


def gaps_ms(came: Sequence[float], start: float, end: float) -> list[float]:
    """Return the gaps between tokens that any part of this time lies in."""
    return [(b - a) * 1e3 for a, b in pairwise([*came]) if b > start and a < end]
