"""Proves a fresh engine: it must generate a token before anyone relies on it."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from llamactl_builder.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable

READY_S = 300.0  # a big model from a cold disk
TOKEN_S = 300.0
STOP_S = 10.0
POLL_S = 0.02
SOCKET_BYTES_MAX = 107  # sun_path, less its final zero
TAIL_LINES = 25


class EngineCrashError(BuildError):
    """The engine died by a signal; `signal_number` says which."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(
            "engine_crashed",
            message,
            "The binary is not accepted. If it was built for another processor, give "
            "--cmake-arg=-DGGML_NATIVE=OFF.",
        )
        self.signal_number = signal_number


def generate_token(engine: Path, model: Path) -> None:
    """Start the engine on a private socket, ask one token of it, stop it; raise if it cannot."""
    with tempfile.TemporaryDirectory(prefix="llamactl-probe-") as scratch:
        address, log = Path(scratch) / "probe.sock", Path(scratch) / "log"
        if len(bytes(address)) > SOCKET_BYTES_MAX:
            raise BuildError(
                "socket_path_long",
                f"The probe's socket {address} is longer than {SOCKET_BYTES_MAX} bytes.",
                "Set TMPDIR to a shorter directory.",
            )
        command = [str(engine), "-m", str(model), "--host", str(address), "-c", "512", "-np", "1"]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                _converse(child, address)
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                raise _failure(child, error, command, log) from error
            finally:
                _stop(child)


def _converse(child: subprocess.Popen[bytes], address: Path) -> None:
    """Wait until the model is loaded, then generate one token."""
    transport = httpx.HTTPTransport(uds=str(address))
    with httpx.Client(transport=transport, base_url="http://probe", timeout=TOKEN_S) as client:
        deadline = time.monotonic() + READY_S
        _wait(child, deadline, lambda: _listening(address))
        _wait(child, deadline, lambda: client.get("/health").status_code == httpx.codes.OK)
        body = {"prompt": "Once upon a time", "n_predict": 1, "temperature": 0}
        answer = client.post("/completion", json=body)
        answer.raise_for_status()
        if answer.json().get("tokens_predicted") != 1:
            raise httpx.DecodingError(f"no token in the answer: {answer.text[:500]}")


def _listening(address: Path) -> bool:
    """Asked apart from HTTP: httpx leaks the socket of a connection that is refused."""
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(address)) == 0


def _wait(child: subprocess.Popen[bytes], deadline: float, state: Callable[[], bool]) -> None:
    """Wait for a state, the end of the engine or the deadline, whichever is first."""
    while not state():
        if child.poll() is not None:
            raise TimeoutError("it ended before it was ready")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not ready after {READY_S:.0f} s")
        time.sleep(POLL_S)


def _failure(
    child: subprocess.Popen[bytes], error: Exception, command: list[str], log: Path
) -> BuildError:
    """What went wrong, told by how the engine ended and by its last lines."""
    try:
        status: int | None = child.wait(1.0)  # a dying process may still be writing its core
    except subprocess.TimeoutExpired:
        status = None
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    tried = (
        f"The fresh engine generated no token.\nTried: {' '.join(command)}\nIts log ends:\n{tail}"
    )
    if status is not None and status < 0:
        return EngineCrashError(f"{tried}\nIt died by {signal.Signals(-status).name}.", -status)
    ended = "It was still running" if status is None else f"It ended with {status}"
    return BuildError("engine_no_token", f"{tried}\n{ended}; the request: {error}.")


def _stop(child: subprocess.Popen[bytes]) -> None:
    """TERM, a bounded wait, KILL."""
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
