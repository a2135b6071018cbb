"""A daemon of our own in a directory of its own, and every process that comes of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import psutil
from llamactl_supervisor.client import Client
from llamactl_supervisor.config import Paths
from llamactl_supervisor.errors import DaemonUnreachableError, LlamactlError
from llamactl_supervisor.models import EngineRequest, EngineState, UpRequest
from llamactl_validate.ports import free_port as free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAKE_ENGINE = Path(__file__).parent / "fakes" / "fake_engine.py"
SOURCE = Path(__file__).parents[1] / "supervisor"
WITHIN_S = 60.0
"""For so long a test waits for what takes a moment; a busy machine needs a fraction of it."""

_T = TypeVar("_T")


def until(what: Callable[[], _T], *, within_s: float = WITHIN_S) -> _T:
    """Return the first true value of `what`; fail with its last value at the deadline."""
    deadline = time.monotonic() + within_s
    while not (value := what()):
        assert time.monotonic() < deadline, f"still {value!r} after {within_s:g} s"
        with contextlib.suppress(InterruptedError):
            signal.sigtimedwait((), 0.02)
    return value


class Sandbox:
    """Directories, environment, daemons and a client. Short paths: a socket's name is bounded."""

    def __init__(self, **settings: object) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="llamactl-"))
        self.env = {
            "LLAMACTL_CACHE_DIR": str(self.root / "c"),
            "LLAMACTL_STATE_DIR": str(self.root / "s"),
            "LLAMACTL_RUNTIME_DIR": str(self.root / "r"),
            "XDG_CONFIG_HOME": str(self.root / "config"),
            "LLAMACTL_READY_POLL_S": "0.02",
            "LLAMACTL_PROBE_S": "0.1",
            "LLAMACTL_BACKOFF_BASE_S": "0.05",
            "LLAMACTL_STOP_TERM_S": "10",
            "LLAMACTL_DRAIN_S": "2",
            "PYTHONPATH": str(SOURCE),
            "PYTHONWARNINGS": "error",
        }
        self.env |= {f"LLAMACTL_{name.upper()}": str(value) for name, value in settings.items()}
        self.paths = Paths.from_env(self.env)
        self.client = Client(self.paths)
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        self.model = self.root / "model.gguf"
        self.model.write_bytes(b"GGUF")

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a daemon and wait for nothing."""
        command = [sys.executable, "-m", "llamactl_supervisor", "serve", *arguments]
        with (self.root / "daemon.log").open("ab") as log:
            daemon = subprocess.Popen(command, env=os.environ | self.env, stderr=log)
        self.daemons.append(daemon)
        return daemon

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a daemon; return when it answers."""
        daemon = self.spawn(*arguments)
        until(lambda: daemon.poll() is not None or self.answers())
        assert daemon.poll() is None, self.daemon_log()
        return daemon

    def answers(self) -> bool:
        """Whether a daemon answers."""
        try:
            return bool(self.client.status())
        except DaemonUnreachableError:
            return False

    def daemon_log(self) -> str:
        """Return what all daemons wrote."""
        return (self.root / "daemon.log").read_text()

    def request(self, *fake: str, n_ctx: int = 16384, n_seq: int = 2) -> UpRequest:
        """Return a request for the fake engine with these misbehaviours."""
        spec = EngineRequest(
            model=str(self.model), n_ctx=n_ctx, n_seq=n_seq, port=self.port, extra_args=fake
        )
        return UpRequest(spec=spec, engine_path=str(FAKE_ENGINE))

    def up(self, *fake: str) -> int:
        """Run the fake engine until it is ready; return its pid."""
        operation = self.client.up(self.request(*fake))
        self.client.wait_operation(operation, timeout_s=WITHIN_S)
        return self.engine_pid()

    def say(self, **fields: object) -> dict[str, Any]:
        """Have the fake engine say this of itself from now on; return all that it says."""
        url = f"http://127.0.0.1:{self.port}/fake"
        answer = httpx.post(url, json=fields, timeout=WITHIN_S)
        said: dict[str, Any] = answer.raise_for_status().json()
        return said

    def engine_pid(self) -> int:
        """Return the pid of the engine that runs."""
        engine = self.client.status().engine
        assert engine is not None
        return engine.pid

    def until_state(self, *states: EngineState) -> None:
        """Wait for one of the states."""
        until(lambda: self.client.status().state in states)

    def metrics(self) -> str:
        """Return the daemon's metrics."""
        transport = httpx.HTTPTransport(uds=str(self.paths.control_socket))
        with httpx.Client(transport=transport, timeout=WITHIN_S) as client:
            return client.get("http://llamactl/metrics").text

    def processes(self) -> list[psutil.Process]:
        """Return every living process of this sandbox: daemons, holders, engines."""
        return list(self._processes())

    def _processes(self) -> Iterator[psutil.Process]:
        runtime = self.env["LLAMACTL_RUNTIME_DIR"]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, FileNotFoundError):
                ours = process.environ().get("LLAMACTL_RUNTIME_DIR") == runtime
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def leftovers(self) -> list[str]:
        """Return what should be gone after `down`: processes, sockets, instance directories."""
        found = [f"{process.pid} {process.name()}" for process in self.processes()]
        return found + [str(path) for path in self.paths.runtime.glob("[!d]*")]

    def kill_daemon(self) -> None:
        """Kill the newest daemon as nothing can be caught."""
        self.daemons[-1].kill()
        self.daemons[-1].wait(WITHIN_S)

    def refused(self, *fake: str) -> LlamactlError:
        """Ask for an engine and return why it did not come up."""
        try:
            self.up(*fake)
        except LlamactlError as exc:
            return exc
        raise AssertionError("it came up")

    def close(self) -> None:
        """End everything that is left."""
        self.client.close()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for daemon in self.daemons:
            daemon.wait(WITHIN_S)
        shutil.rmtree(self.root, ignore_errors=True)
