"""The supervisor and the real engine where things go wrong: crashes, stops, deaths under load."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from cli_home import COMMAND
from live_daemon import IDLE_S, PATIENCE_S, Live
from live_engine import live_engine
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineState
from sandbox import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from llamactl_supervisor.models import Operation

PREFILL_S = 60.0
CYCLES = 20
STORY = "Once upon a time there was a lighthouse keeper who kept a fox. Every evening"
ENDLESS = {"prompt": STORY, "n_predict": 2000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def live(engine_path: Path, model_path: Path) -> Iterator[Live]:
    with contextlib.closing(Live(engine_path, model_path)) as box:
        box.start()
        yield box


def reach(chunks: list[str], count: int) -> None:
    """Wait until a stream has come that far."""
    until(lambda: len(chunks) >= count, within_s=PATIENCE_S)


def test_a_daemon_that_is_killed_under_load_is_not_missed(live: Live) -> None:
    """The stream gets every token, the ledger no line, and the log loses none."""
    pid = live.up_real()
    body = {"prompt": STORY, "n_predict": 150, "temperature": 0, "ignore_eos": True}
    body |= {"cache_prompt": False, "id_slot": 0}
    control: list[str] = []
    live.stream(control, **body)
    chunks: list[str] = []
    stream = live.pool.submit(live.stream, chunks, **body)
    reach(chunks, 5)
    ledger, before = live.causes(), live.paths.engine_log.read_text()
    live.kill_daemon()
    asked = 5
    for _ in range(asked):
        live.complete(prompt=STORY, n_predict=1, id_slot=1)
    live.start()
    status = live.until_generation(1)
    assert status.engine is not None
    assert (status.engine.pid, status.engine.adopted) == (pid, True)
    last = stream.result(PATIENCE_S)
    assert "".join(chunks) == "".join(control)
    assert (last["stop"], last["tokens_predicted"]) == (True, 150)
    assert (live.causes(), status.weight_loads) == (ledger, 1)
    log = "".join(f"{line}\n" for line in live.client.logs(lines=10_000))
    assert log.startswith(before)
    started = [line for line in log.removeprefix(before).splitlines() if "launch_slot_" in line]
    assert len(started) == asked, log


def test_down_stops_an_engine_that_outlived_its_daemon(live: Live) -> None:
    pid = live.up_real()
    live.kill_daemon()
    env = {name: value for name, value in live.env.items() if name != "PYTHONPATH"}
    told = _llamactl(env, "status")
    assert told.returncode == 4
    assert f"engine {pid} outlived it" in told.stderr
    ended = _llamactl(env, "down")
    assert (ended.returncode, ended.stdout) == (0, "engine stopped\n"), ended.stderr
    assert f"engine {pid} still runs" in ended.stderr
    until(lambda: live.leftovers() == [])


def _llamactl(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *words]
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_port_of_a_stranger_is_named_and_the_stranger_left_alone(live: Live) -> None:
    with socket.create_server(("127.0.0.1", live.port)), pytest.raises(LlamactlError) as caught:
        live.up_real()
    assert (caught.value.code, caught.value.details["pid"]) == ("port_in_use", os.getpid())
    assert live.client.status().state is EngineState.FAILED


def test_a_prefill_of_a_minute_is_not_taken_for_a_wedge(live: Live) -> None:
    """On one thread, in micro-batches of seconds, with a tenth of the patience that is usual."""
    pid = live.up_real("--threads", "1", "--ubatch-size", "1024", n_ctx=4 * 8192, n_seq=4)
    prompts = [[100 + number * 7 % 4000 for number in range(8000)] for _ in range(4)]
    counts: set[int] = set()
    with httpx.Client(base_url=f"http://127.0.0.1:{live.port}", timeout=PATIENCE_S) as client:
        began = time.monotonic()
        asked = json.dumps({"prompt": prompts, "n_predict": 1})
        with socket.create_connection(("127.0.0.1", live.port)) as request:
            head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(asked)}\r\n\r\n"
            request.sendall((head + asked).encode())
            until(lambda: client.get("/props").json()["compute_progress"]["is_working"])

            def told() -> bool:
                progress = client.get("/props").json()["compute_progress"]
                counts.add(progress["n_ubatches"])
                assert progress["is_working"], "the prompt is too short for this machine"
                return time.monotonic() - began > PREFILL_S

            until(told, within_s=PREFILL_S + PATIENCE_S)
        status = live.client.status()
        assert status.engine is not None
        assert (status.engine.pid, status.state, status.crashes) == (pid, EngineState.READY, 0)
        assert len(counts) > 2


def test_a_sleep_is_left_alone_and_a_wake_is_a_load_in_the_ledger(live: Live) -> None:
    """Looking at it neither wakes the engine nor keeps it awake."""
    pid = live.up_real("--sleep-idle-seconds", "1")

    def asleep() -> bool:
        engine = live.client.status().engine
        return engine is not None and engine.is_sleeping is True

    for n_loads in (2, 3):
        until(asleep)
        slept = time.monotonic() + 2 * IDLE_S
        until(lambda: time.monotonic() > slept)  # noqa: B023 - used at once
        assert asleep()
        assert live.client.status().weight_loads == n_loads - 1
        live.complete(prompt=STORY, n_predict=1)
        until(lambda: live.client.status().weight_loads == n_loads)  # noqa: B023
    assert (live.engine_pid(), live.client.status().crashes) == (pid, 0)
    until(lambda: live.causes() == ["up", "wake", "wake"])


def test_a_change_is_counted_once_whoever_made_it(live: Live) -> None:
    """The engine's account of a change grows after its answer: that is no other change."""
    live.up_real()
    _ended(live, lambda: live.client.reconfigure(n_ctx=16384, n_seq=4))
    engine = live.client.status().engine
    assert engine is not None
    ours = engine.last_reconfigure
    transport = httpx.HTTPTransport(uds=engine.socket)
    with httpx.Client(transport=transport, timeout=PATIENCE_S) as client:
        answer = client.post("http://engine/reconfigure", json={"n_ctx": 8192, "n_seq": 2})
    receipt = answer.raise_for_status().json()
    until(lambda: (override := live.client.status().override) and override.by == "engine socket")
    seen = time.monotonic() + IDLE_S
    until(lambda: time.monotonic() > seen)
    status = live.client.status()
    assert status.engine is not None
    assert status.engine.last_reconfigure is not None
    assert status.engine.last_reconfigure != ours
    assert status.engine.last_reconfigure.pause_ms == receipt["pause_ms"]
    assert status.override is not None
    assert (status.override.n_ctx, status.loads_avoided) == (8192, 2)
    assert live.causes() == ["up", "avoided", "avoided"]


def test_two_daemons_and_an_engine_started_by_hand_never_touch_each_other(
    live: Live, engine_path: Path, model_path: Path
) -> None:
    """Stops, crashes and adoptions here leave what runs there as it is."""
    with (
        contextlib.closing(Live(engine_path, model_path)) as other,
        live_engine(engine_path, model_path) as by_hand,
    ):
        other.start()
        pid, others = live.up_real(), other.up_real()
        os.kill(pid, signal.SIGKILL)
        live.until_generation(2)
        live.kill_daemon()
        live.start()
        live.until_generation(2)
        _ended(live, live.client.restart)
        assert live.client.status().strangers == ()
        live.client.wait_down(timeout_s=PATIENCE_S)
        assert live.leftovers() == []
        status = other.client.status()
        assert (other.engine_pid(), status.crashes, status.strangers) == (others, 0, ())
        assert by_hand.process.poll() is None
        assert other.complete(prompt=STORY, n_predict=1)["tokens_predicted"] == 1
        assert by_hand.ask("/completion", prompt=STORY, n_predict=1).status == 200


def test_many_ends_leave_no_zombie_and_no_open_file(live: Live) -> None:
    """Stopped, restarted and killed in turn: every engine's holder goes with it."""
    live.up_real()
    daemon = psutil.Process(live.daemons[-1].pid)
    ends: list[Callable[[], None]] = [
        lambda: _ended(live, live.client.restart),
        lambda: _ended(live, live.client.stop, live.client.start),
        lambda: os.kill(live.engine_pid(), signal.SIGKILL),
    ]
    open_files: list[tuple[int, int]] = []
    for number in range(CYCLES):
        ends[number % len(ends)]()
        engine = live.until_generation(number + 2).engine
        assert engine is not None
        assert engine.holder_pid is not None
        assert sorted(child.pid for child in daemon.children()) == [engine.holder_pid]
        holder = psutil.Process(engine.holder_pid)
        assert [child.pid for child in holder.children()] == [engine.pid]
        assert psutil.STATUS_ZOMBIE not in {daemon.status(), holder.status()}
        # a connection of the last question may still be on its way out
        until(lambda: daemon.num_fds() <= (open_files or [(daemon.num_fds(), 0)])[0][0] + 2)
        open_files.append((daemon.num_fds(), holder.num_fds()))
    assert len({holders for _, holders in open_files}) == 1
    live.client.wait_down(timeout_s=PATIENCE_S)
    assert live.leftovers() == []


def _ended(live: Live, *commands: Callable[[], Operation]) -> None:
    for command in commands:
        live.client.wait_operation(command(), timeout_s=PATIENCE_S)
