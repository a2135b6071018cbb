"""`llamactl run` as its callers have it: shims, their daemon, and the fake or the real engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from llamactl_supervisor.models import EngineState, LeftLine
from sandbox import FAKE_ENGINE, WITHIN_S, Sandbox, free_port, until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llamactl_supervisor.models import LedgerLine

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-P", "-m", "llamactl_cli", "run")
SMALL = ("-c", "8192", "-np", "2")
LARGE = ("-c", "16384", "-np", "4")
QUICK = ("--no-warmup", "--cache-ram", "0", "-t", "1")


class Shim:
    """One `llamactl run`, with its output in files."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], port: int, log: Path, cwd: Path
    ) -> None:
        self.port, self._out, self._err = port, log.with_suffix(".out"), log.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd
            )
        self.url = f"http://127.0.0.1:{port}"

    @property
    def out(self) -> str:
        """What it wrote to stdout."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """What it wrote to stderr."""
        return self._err.read_text()

    def listens(self) -> bool:
        """Whether its port takes connections; one that has ended by itself is no good."""
        assert self.process.poll() is None, self.err
        try:
            self._get("/health")
        except httpx.TransportError:
            return False
        return True

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=WITHIN_S)

    def healthy(self) -> bool:
        """Whether the engine answers 200 through it."""
        return self.listens() and self._get("/health").status_code == 200

    def ready(self) -> Shim:
        """Return once it is healthy."""
        until(self.healthy)
        return self

    def props(self) -> Any:
        """Return what the engine says of itself."""
        return self._get("/props").raise_for_status().json()

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it; return its status, negative for a signal."""
        self.send(number)
        return self.process.wait(WITHIN_S)


class RunBox(Sandbox):
    """A sandbox whose engines are asked for by `llamactl run`."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        parts = ("supervisor", "cli", "builder", "validate", "bench")
        self.env["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in parts)
        self.shims: list[Shim] = []

    def run(
        self,
        *args: str,
        port: int | None = None,
        options: Sequence[str] = (),
        engine: Path = FAKE_ENGINE,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        prefix: Sequence[str] = (),
    ) -> Shim:
        """Start a shim for the fake engine; `args` are llama-server's."""
        port = free_port() if port is None else port
        given = args if "-m" in args else ("-m", str(self.model), *args)
        command = [*prefix, *COMMAND, *options, "--", str(engine), *given, "--port", str(port)]
        log = self.root / f"shim-{len(self.shims)}"
        whole = os.environ | self.env | (dict(env) if env else {})
        shim = Shim(command, whole, port, log, cwd or self.root)
        self.shims.append(shim)
        return shim

    def ledger(self) -> list[LedgerLine]:
        """Return the whole ledger."""
        return list(self.client.ledger().lines)

    def loads(self) -> list[str]:
        """Return the causes of all weight loads."""
        return [line.cause for line in self.ledger() if line.kind == "load" and line.loaded]

    def left(self) -> list[str]:
        """Return what became of each engine that was left."""
        return [line.outcome.value for line in self.ledger() if isinstance(line, LeftLine)]

    def close(self) -> None:
        """End everything that is left."""
        for shim in self.shims:
            if shim.process.poll() is None:
                shim.process.kill()
            shim.process.wait(WITHIN_S)
        super().close()


class LiveBox(RunBox):
    """Runs of the real engine."""

    def __init__(self, engine: Path, model: Path, **settings: object) -> None:
        super().__init__(**settings)
        self.engine, self.weights = engine, model

    def live(self, *args: str, **how: Any) -> Shim:
        """Start a shim for the real engine."""
        return self.run("-m", str(self.weights), *QUICK, *args, engine=self.engine, **how)


def healthy(url: str) -> bool:
    """Whether somebody there answers 200 for the engine."""
    try:
        return httpx.get(f"{url}/health", timeout=WITHIN_S).status_code == 200
    except httpx.TransportError:
        return False


def told(url: str, prompt: str, n_predict: int = 4, **headers: str) -> Any:
    """Complete the prompt and return the whole answer."""
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/completion", json=body, headers=headers, timeout=WITHIN_S * 4)
    return answer.raise_for_status().json()


def owner_pid(box: RunBox) -> int | None:
    owner = box.client.status().owner
    return None if owner is None else owner.pid


def stopped(box: RunBox) -> bool:
    return box.client.status().state is EngineState.STOPPED
