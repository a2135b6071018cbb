"""`llamactl run` with the real engine, event by event of its contract, each as its caller sees it.

    start      no daemon · no engine · live fields differ · cold fields differ · another model
               refused, for size or for a word · a live owner
    TERM, INT  serving · loading · a second one
    otherwise  KILL · HUP · the linger's end · stop --now · --linger 0
    engine     ends by itself, owned and not
    daemon     dies · down · TERM · somebody else reconfigures
    output     that nobody reads

What takes several starts with conversations in them is in `test_run_live.py`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from llamactl_supervisor.models import EngineState
from run_box import COMMAND, QUICK, LiveBox, healthy, owner_pid, stopped, told
from sandbox import WITHIN_S, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from run_box import Shim
    from tiny_models import TinyModels

SMALL = ("-c", "4096", "-np", "2")
LARGE = ("-c", "8192", "-np", "3")
STORY = "Once upon a time a fox and a hen lived in a wood. " * 4
PATIENT_S = 4 * WITHIN_S
TRIES = 8
PIPE_BYTES = 2**16
"""What a pipe of Linux holds."""


@pytest.fixture
def box(engine_path: Path, model_path: Path) -> Iterator[LiveBox]:
    with closing(LiveBox(engine_path, model_path, linger_s=600, probe_s=1)) as box:
        box.start()
        yield box


def state(box: LiveBox) -> EngineState:
    return box.client.status().state


def lingers(box: LiveBox) -> bool:
    return box.client.status().lingers_s is not None


def refuses(shim: Shim) -> bool:
    """Whether nobody listens at its port any more."""
    try:
        httpx.get(f"{shim.url}/health", timeout=WITHIN_S)
    except httpx.ConnectError:
        return True
    return False


def slots(url: str) -> Any:
    return httpx.get(f"{url}/slots", timeout=WITHIN_S).json()


# --- start ---------------------------------------------------------------------------------------


def test_no_daemon(engine_path: Path, model_path: Path) -> None:
    """One is started, and it outlives the shim with the engine."""
    with closing(LiveBox(engine_path, model_path, linger_s=600)) as box:
        shim = box.live(*SMALL).ready()
        assert shim.end() == 0
        assert state(box) is EngineState.READY
        assert box.client.status().daemon.pid != shim.process.pid


def test_no_engine(box: LiveBox) -> None:
    """It is loaded for who asks; before that nobody listens, or the engine's own 503 comes."""
    shim = box.live(*SMALL)
    statuses = set()

    def serves() -> bool:
        if shim.listens():
            statuses.add(httpx.get(f"{shim.url}/health", timeout=WITHIN_S).status_code)
        return 200 in statuses

    until(serves)
    assert statuses <= {200, 503}
    until(lambda: len(box.ledger()) == 1)
    (line,) = box.ledger()
    assert line.kind == "load"
    assert (line.cause, line.by) == ("run", f"run pid {shim.process.pid}")


def test_live_fields_differ(box: LiveBox) -> None:
    """The same engine; the new port never answers with the geometry from before."""
    assert box.live(*SMALL).ready().end() == 0
    pid = box.engine_pid()
    shim = box.live(*LARGE)
    until(shim.listens)
    assert shim.props()["total_slots"] == 3
    assert box.engine_pid() == pid
    until(lambda: box.loads() == ["run"])
    until(lambda: [line.kind for line in box.ledger()].count("avoided") == 1)
    until(lambda: box.left() == ["taken"])


def test_cold_fields_differ(box: LiveBox) -> None:
    """Another engine, after the one before is gone; it has the conversation of that one."""
    shim = box.live(*SMALL).ready()
    told(shim.url, STORY)
    assert shim.end() == 0
    pid = box.engine_pid()
    again = box.live(*SMALL, "-b", "512").ready()
    assert box.engine_pid() != pid
    assert not psutil.pid_exists(pid)
    assert told(again.url, STORY)["timings"]["prompt_n"] < 8
    until(lambda: box.loads() == ["run", "run"])
    until(lambda: box.left() == ["replaced"])


def test_another_model(box: LiveBox, tiny: TinyModels) -> None:
    assert box.live(*SMALL).ready().end() == 0
    pid = box.engine_pid()
    other = ("-m", str(tiny.model("llama-dense")), *QUICK, "-c", "512", "-np", "1")
    shim = box.run(*other, engine=box.engine).ready()
    assert not psutil.pid_exists(pid)
    assert shim.props()["model_path"].endswith("llama-dense.gguf")
    until(lambda: box.left() == ["replaced"])


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("-c", "2000000000", "-np", "2"), r"\d+ MiB.* \d+ MiB"),
        (("-c", "16k"), r"n_ctx: .* not 16$"),  # what llama-server makes of it
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_refused(box: LiveBox, asked: tuple[str, ...], why: str) -> None:
    """Exit 1, with both numbers or the engine's words; what lingers goes on lingering."""
    assert box.live(*SMALL).ready().end() == 0
    until(lambda: lingers(box))
    pid = box.engine_pid()
    shim = box.live(*asked)
    assert shim.process.wait(PATIENT_S) == 1
    (said,) = [line for line in shim.err.splitlines() if line.startswith("llamactl run: ")]
    assert re.search(why, said), said
    until(lambda: owner_pid(box) is None)
    assert (box.engine_pid(), lingers(box)) == (pid, True)


def test_a_live_owner(box: LiveBox) -> None:
    first = box.live(*SMALL).ready()
    second = box.live(*LARGE)
    assert second.process.wait(PATIENT_S) == 1
    assert f"pid {first.process.pid} on port {first.port}" in second.err
    assert first.props()["total_slots"] == 2


# --- TERM and INT --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_serving(box: LiveBox, number: signal.Signals) -> None:
    """The port is closed, what ran is cancelled, and what it had read is the next one's."""
    shim = box.live(*SMALL).ready()
    body = {"prompt": STORY, "n_predict": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{shim.url}/completion", json=body, timeout=PATIENT_S) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        assert shim.end(number) == 0
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in lines:
                pass
    assert refuses(shim)
    until(lambda: lingers(box))
    again = box.live(*SMALL).ready()
    until(lambda: not any(slot["is_processing"] for slot in slots(again.url)))
    assert told(again.url, STORY)["timings"]["prompt_n"] < 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading(box: LiveBox, number: signal.Signals) -> None:
    """The load is aborted; the engine is held in the middle of it, if it is caught there."""
    for _ in range(TRIES):
        shim = box.live(*SMALL)
        until(lambda: box.client.status().engine)
        pid = box.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        if shim.end(number) == -number:
            break
        os.kill(pid, signal.SIGCONT)
        box.client.wait_operation(box.client.stop(), timeout_s=PATIENT_S)
    assert shim.process.returncode == -number
    until(lambda: stopped(box), within_s=PATIENT_S)
    assert not psutil.pid_exists(pid)
    until(lambda: box.left()[-1:] == ["aborted"])


def test_a_second_signal(box: LiveBox) -> None:
    """The first one waits for the end of an engine that does not come to it."""
    shim = box.live(*SMALL, options=["--linger", "0"]).ready()
    os.kill(box.engine_pid(), signal.SIGSTOP)
    shim.send(signal.SIGTERM)
    until(lambda: state(box) is EngineState.STOPPING)
    assert shim.process.poll() is None
    assert shim.end(signal.SIGINT) == 1
    until(lambda: stopped(box), within_s=PATIENT_S)


# --- other ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_kill_and_a_hangup(box: LiveBox, number: signal.Signals) -> None:
    assert box.live(*SMALL).ready().end(number) == -number
    until(lambda: lingers(box))
    box.live(*SMALL).ready()
    until(lambda: box.loads() == ["run"])


def test_the_lingers_end(box: LiveBox) -> None:
    shim = box.live(*SMALL, options=["--linger", "0.5"]).ready()
    pid = box.engine_pid()
    assert shim.end() == 0
    until(lambda: stopped(box), within_s=PATIENT_S)
    assert not psutil.pid_exists(pid)
    until(lambda: box.left() == ["expired"])


def test_a_stop_now(box: LiveBox) -> None:
    shim = box.live(*SMALL).ready()
    pid = box.engine_pid()
    command = [*COMMAND[:-1], "stop", "--now"]
    assert subprocess.run(command, env=os.environ | box.env, check=False).returncode == 0
    assert shim.process.wait(PATIENT_S) == 0
    assert not psutil.pid_exists(pid)


def test_no_linger(box: LiveBox) -> None:
    """The exit means that the memory is free."""
    shim = box.live(*SMALL, options=["--linger", "0"]).ready()
    pid = box.engine_pid()
    shim.send(signal.SIGTERM)
    assert shim.process.wait(PATIENT_S) == 0
    assert not psutil.pid_exists(pid)
    until(lambda: box.left() == ["stopped"])


# --- the engine's end ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_the_engine_ends_with_an_owner(box: LiveBox, number: signal.Signals) -> None:
    shim = box.live(*SMALL).ready()
    box.until_state(EngineState.READY)
    os.kill(box.engine_pid(), number)
    assert shim.process.wait(PATIENT_S) == -number
    assert stopped(box)
    until(lambda: list(box.paths.crashes.iterdir()))
    until(lambda: box.loads() == ["run"])


def test_the_engine_ends_without_an_owner(box: LiveBox) -> None:
    assert box.live(*SMALL).ready().end() == 0
    os.kill(box.engine_pid(), signal.SIGKILL)
    until(lambda: stopped(box))
    until(lambda: box.left() == ["exited"])
    until(lambda: list(box.paths.crashes.iterdir()))
    box.live(*SMALL).ready()
    until(lambda: box.loads() == ["run", "run"])


# --- the daemon ----------------------------------------------------------------------------------


def test_the_daemon_dies(box: LiveBox) -> None:
    """It is relayed on, in the middle of a stream too, and the next daemon has both back."""
    shim = box.live(*SMALL).ready()
    pid = box.engine_pid()
    body = {"prompt": STORY, "n_predict": 64, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{shim.url}/completion", json=body, timeout=PATIENT_S) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        box.kill_daemon()
        assert sum(line.startswith("data: ") for line in lines) >= 64
    box.start()
    until(lambda: owner_pid(box) == shim.process.pid, within_s=PATIENT_S)
    assert (box.engine_pid(), lingers(box)) == (pid, False)
    assert shim.end() == 0
    until(lambda: lingers(box))
    assert box.client.status().weight_loads == 1


@pytest.mark.parametrize("how", ["down", "TERM"])
def test_the_daemon_is_ended(box: LiveBox, how: str) -> None:
    shim = box.live(*SMALL).ready()
    pid = box.engine_pid()
    if how == "down":
        box.client.wait_down(timeout_s=PATIENT_S)
    else:
        box.daemons[-1].terminate()
    assert shim.process.wait(PATIENT_S) == 0
    assert box.daemons[-1].wait(PATIENT_S) == 0
    assert not psutil.pid_exists(pid)


def test_somebody_else_reconfigures(box: LiveBox) -> None:
    shim = box.live(*SMALL).ready()
    box.until_state(EngineState.READY)
    box.client.wait_operation(box.client.reconfigure(n_ctx=8192), timeout_s=PATIENT_S)
    until(lambda: "now n_ctx 8192, n_seq 2" in shim.err)
    assert shim.props()["context_geometry"]["n_ctx"] == 8192
    assert shim.end() == 0
    again = box.live(*SMALL)
    until(again.listens)
    assert again.props()["context_geometry"]["n_ctx"] == 4096
    until(lambda: box.loads() == ["run"])


# --- output --------------------------------------------------------------------------------------


def test_output_that_nobody_reads(box: LiveBox) -> None:
    """The engine, verbose into a full pipe, would stand still for ever: here it goes on."""
    port = free_port()
    server = [str(box.engine), "-m", str(box.weights), *QUICK, *SMALL, "-v", "--port", str(port)]
    with subprocess.Popen(
        [*COMMAND, "--", *server],
        env=os.environ | box.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=box.root,
    ) as shim:
        assert shim.stderr is not None
        url = f"http://127.0.0.1:{port}"
        until(lambda: healthy(url), within_s=PATIENT_S)
        assert told(url, STORY, 64)["tokens_predicted"] == 64
        read = bytearray()
        reading = threading.Thread(target=lambda: read.extend(shim.stderr.read()))  # type: ignore[union-attr]
        shim.terminate()
        reading.start()
        assert shim.wait(PATIENT_S) == 0
        reading.join()
    assert len(read) > PIPE_BYTES, "the pipe was full"
