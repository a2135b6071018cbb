"""A daemon of one's own, over directories that nobody else knows, with the engine that it has."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from llamactl_supervisor.client import Client
from llamactl_supervisor.config import FILE_ENV
from llamactl_supervisor.errors import DaemonUnreachableError
from llamactl_supervisor.models import EngineRequest, EngineState, LoadLine, UpRequest
from llamactl_supervisor.paths import ENV_PREFIX

from llamactl_validate import lowly, running, warden
from llamactl_validate.asked import Asked, private_door
from llamactl_validate.engine import N_CTX, N_SEQ, OPTIONS_OF_ENV, PATIENT_THREADS
from llamactl_validate.expecting import Failed, until
from llamactl_validate.ports import free_port
from llamactl_validate.workplace import Workplace

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping

    from llamactl_supervisor.models import EngineStatus, Operation, Status

NOT_OURS = (ENV_PREFIX, OPTIONS_OF_ENV, "NOTIFY_", "LISTEN_", "WATCHDOG_")
"""Begins what is meant for the user's own daemon and engine, and for a service that we are."""
SETTINGS = {"probe_s": 0.25, "stop_term_s": 1.0, "backoff_base_s": 0.1}
"""Seconds; a drill need not wait as long as a service does."""
LAST_LINES = 5


class Daemon:
    """One daemon at a time, each of which finds what the one before it has left.

    They, their engine and its holder go when this process does, however it ends, and are lowly
    meanwhile. `settings` are those of [daemon], in place of `SETTINGS`. `patience_s` bounds every
    wait. Raises what `Workplace` raises.
    """

    def __init__(
        self,
        program: Path,
        model: Path,
        *,
        patience_s: float,
        idle: bool = True,
        settings: Mapping[str, float] | None = None,
    ) -> None:
        self.patience_s = patience_s
        self._open = ExitStack()
        self.place = Workplace()
        self._open.callback(self.place.close)
        try:
            self.paths = self.place.paths
            self._key = secrets.token_hex()
            keys = self.place.path / "keys"
            keys.write_text(f"{self._key}\n")
            keys.chmod(0o600)
            spec = EngineRequest(
                model=str(model),
                n_ctx=N_CTX,
                n_seq=N_SEQ,
                port=free_port(),
                api_key_file=str(keys),
            )
            self._wanted = UpRequest(spec=spec, engine_path=str(program))
            self.client = Client(self.paths)
            self._warden = self._watched(SETTINGS | dict(settings or {}), idle=idle)
            self.start()
            self.done(self.client.up(self._wanted))
        except BaseException:
            self.close()
            raise

    def _watched(self, settings: Mapping[str, float], *, idle: bool) -> subprocess.Popen[bytes]:
        """Start what starts the daemons and ends them."""
        config = self.place.path / "config.toml"
        lines = [f"{name} = {value}" for name, value in settings.items()]
        config.write_text("\n".join(["[daemon]", *lines, ""]))
        config.chmod(0o600)
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(NOT_OURS)
        }
        flag = lowly.IDLE if idle else lowly.EQUAL
        daemon = [sys.executable, "-P", "-m", "llamactl_supervisor", "serve"]
        with self.place.log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", warden.__name__, flag, *daemon],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=inherited | PATIENT_THREADS | {FILE_ENV: str(config)} | self.paths.env(),
                start_new_session=True,  # the terminal's signals end us, and so all of it
            )
        self._open.callback(_ended, process)
        running.add(process, process.terminate)
        return process

    def close(self) -> None:
        """End everything, and remove what it left."""
        self._open.close()

    def start(self) -> None:
        """Start a daemon; return when it answers."""
        assert self._warden.stdin is not None
        assert self._warden.stdout is not None
        self._warden.stdin.write(warden.START)
        self._daemon = psutil.Process(int(self._warden.stdout.readline()))
        until("the daemon answers", self._answers_or_ended, within_s=self.patience_s)
        if not self._daemon.is_running():
            lines = self.place.log.read_text(errors="replace").splitlines()
            raise Failed(f"the daemon ended: {' | '.join(lines[-LAST_LINES:])}")

    def _answers_or_ended(self) -> bool:
        with suppress(DaemonUnreachableError):
            return self.status().daemon.pid == self._daemon.pid
        return not self._daemon.is_running()

    def kill(self) -> None:
        """Have the daemon die at once."""
        self._daemon.kill()
        self._daemon.wait(self.patience_s)

    def status(self) -> Status:
        """Return everything that the daemon knows."""
        return self.client.status()

    def signal_engine(self, number: signal.Signals) -> psutil.Process:
        """Signal the engine, which has to be ours; return it."""
        pid = self.running().pid
        ours = {each.pid: each for each in self.processes()}
        if pid not in ours:
            raise Failed(f"the engine {pid} is no process of ours")
        ours[pid].send_signal(number)
        return ours[pid]

    def processes(self) -> list[psutil.Process]:
        """Return all that came of us: the warden, the daemon, the holder, the engine."""
        first = psutil.Process(self._warden.pid)
        return [first, *first.children(recursive=True)]

    def engine(self) -> Asked:
        """Return the door of the engine that there is."""
        socket_path = Path(self.running().socket)
        door = self._open.enter_context(private_door(socket_path, self.patience_s))
        door.headers["Authorization"] = f"Bearer {self._key}"
        return Asked(door, self.patience_s)

    def running(self) -> EngineStatus:
        """Return what is known of the engine that there is."""
        found = self.status().engine
        if found is None:
            raise Failed("there is no engine")
        return found

    def until_generation(self, generation: int) -> Status:
        """Wait until the engine that was started with this number is ready."""

        def ready() -> Status | None:
            status = self.status()
            if status.state is EngineState.FAILED:
                raise Failed(f"the engine was given up: {status.problem}")
            there = (status.generation, status.state) == (generation, EngineState.READY)
            return status if there else None

        status = until(f"engine {generation} is ready", ready, within_s=self.patience_s)
        assert status is not None
        return status

    def loads(self) -> list[str]:
        """Return why weights were loaded, each time, by the ledger."""
        lines = self.client.ledger().lines
        return [line.cause for line in lines if isinstance(line, LoadLine) and line.loaded]

    def done(self, operation: Operation) -> Operation:
        """Return an operation that has succeeded."""
        return self.client.wait_operation(operation, timeout_s=self.patience_s)


def _ended(process: subprocess.Popen[bytes]) -> None:
    """Let a warden end all that came of it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()
    running.ended(process)
