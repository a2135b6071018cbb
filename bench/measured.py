"""An engine to measure, and what every benchmark needs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def say(text: str) -> None:
    """Progress goes to stderr, the table to stdout."""
    sys.stderr.write(text + "\n")


class Engine:
    """A llama-server on a port of its own."""

    def __init__(
        self, binary: Path, model: Path, slots_dir: Path, n_seq: int, *options: str
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=None,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self.process = subprocess.Popen(
            [
                *(str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(self.port)),
                *("-c", str(8192 * n_seq), "-np", str(n_seq), "--slot-save-path", str(slots_dir)),
                *("--cache-ram", "0", "--no-ui", *options),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not self._ready():
            if self.process.poll() is not None:
                raise SystemExit(f"{binary} exited with {self.process.returncode}")
            time.sleep(0.01)

    @property
    def n_vocab(self) -> int:
        """Tokens that the model knows."""
        n: int = self.http.get("/v1/models").json()["data"][0]["meta"]["n_vocab"]
        return n

    def _ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.http.get("/health").status_code == httpx.codes.OK
        return False

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """POST JSON; a status other than 200 ends the run."""
        answer = self.http.post(path, json=body)
        if answer.status_code != httpx.codes.OK:
            raise SystemExit(f"POST {path}: {answer.status_code} {answer.text}")
        document: dict[str, Any] = answer.json()
        return document

    def complete(self, slot: int, prompt: list[int], n_predict: int) -> dict[str, Any]:
        """Return the `timings` of one completion in this slot."""
        answer = self.post(
            "/completion",
            prompt=prompt,
            n_predict=n_predict,
            id_slot=slot,
            temperature=0,
            ignore_eos=True,
            cache_prompt=True,
        )
        timings: dict[str, Any] = answer["timings"]
        return timings

    def converse(self, prompts: list[list[int]]) -> None:
        """Hold one conversation in each slot."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda slot: self.complete(slot, prompts[slot], 1), range(len(prompts))))

    def resident_bytes(self) -> int:
        """Bytes of memory that the process has resident."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def stop(self) -> None:
        """SIGTERM, and wait until it is gone."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


@contextlib.contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """Stop the engine whatever happens."""
    try:
        yield engine
    finally:
        if engine.process.poll() is None:
            engine.stop()


def seconds(action: Callable[[], object]) -> float:
    """How long an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def memcpy_ms(n_bytes: int, repeats: int) -> float:
    """Median time of one copy of so many bytes into memory that is already resident."""
    source, target = memoryview(bytearray(b"\1" * n_bytes)), memoryview(bytearray(b"\2" * n_bytes))

    def copy() -> None:
        target[:] = source

    copy()
    return statistics.median(seconds(copy) for _ in range(repeats)) * 1e3


def prompt_of(n_tokens: int, seed: int, n_vocab: int = 8192) -> list[int]:
    """Token ids that no other conversation begins with."""
    first = min(200, n_vocab // 4)
    n = min(4000, n_vocab - first)
    return [first + (seed * 7919 + 31 * i + i * i % 97) % n for i in range(n_tokens)]
