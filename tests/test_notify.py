"""What the service manager is told: the exact messages of real daemons, in their order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_supervisor import store
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineState, Intent, Receipt, ReloadResult
from llamactl_supervisor.notify import Notifier
from manager import Manager
from sandbox import FAKE_ENGINE, WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

EXTEND = "EXTEND_TIMEOUT_USEC=10000000"
STARTING = "STATUS=starting: engine pid N"
READY = "READY=1\nSTATUS=ready: 16384 tokens over 2 slots, engine pid N"
STOPPING = "STATUS=stopping: {}16384 tokens over 2 slots, engine pid N"
CARRYING = (
    "writing its conversations",
    "asking the engine to be quiet, until T at the latest",
    "asking what its slots hold, for 10 s if it does nothing",
    "writing 1 of 2 conversations, until T at the latest",
    "writing 2 of 2 conversations, until T at the latest",
    "asking what its slots hold, for 10 s if it does nothing",
)
HANDED_OVER = "16384 tokens over 2 slots, engine pid N, handed over to the next daemon"


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=2, crashes_max=1)
    yield sandbox
    sandbox.close()


@pytest.fixture
def manager(box: Sandbox) -> Iterator[Manager]:
    manager = Manager.at(box.root / "notify")
    box.env["NOTIFY_SOCKET"] = manager.address
    yield manager
    manager.close()


def wanted(box: Sandbox, *fake: str) -> None:
    """Have the next daemon find that this engine is wanted."""
    box.paths.create()
    saved = store.Saved(intent=Intent.UP, desired=box.request(*fake))
    store.save(box.paths.state_file, saved)


def started(box: Sandbox, manager: Manager, *fake: str) -> subprocess.Popen[bytes]:
    """Start a daemon with an engine that is ready, and forget what it told of that."""
    wanted(box, *fake)
    daemon = box.start()
    manager.until("READY=1")
    return daemon


def test_with_nothing_wanted_the_daemon_is_ready_at_once(box: Sandbox, manager: Manager) -> None:
    box.start()
    assert manager.until("READY=1") == ["READY=1\nSTATUS=stopped"]


def test_a_start_is_over_when_the_engine_serves(box: Sandbox, manager: Manager) -> None:
    """The load takes longer than one extension lasts until the next is due."""
    wanted(box, "--fake-load-s", "2.5")
    began = time.monotonic()
    box.start()
    assert manager.until("READY=1") == ["STATUS=starting", EXTEND, STARTING, EXTEND, READY]
    assert time.monotonic() - began > 2.5
    assert box.client.status().state is EngineState.READY


def test_a_later_change_of_the_engine_is_a_new_text(box: Sandbox, manager: Manager) -> None:
    started(box, manager)
    box.client.wait_operation(box.client.reconfigure(n_ctx=131072, n_seq=4), timeout_s=WITHIN_S)
    assert manager.until("STATUS=ready") == [
        "STATUS=reconfiguring: 16384 tokens over 2 slots, engine pid N",
        "STATUS=ready: 131072 tokens over 4 slots, engine pid N",
    ]
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    geometry = "131072 tokens over 4 slots, engine pid N"
    assert manager.until("STATUS=stopped") == [
        *(f"STATUS=stopping: {text}, {geometry}" for text in CARRYING),
        f"STATUS=stopping: {geometry}",
        "STATUS=stopped",
    ]


def configured(box: Sandbox, manager: Manager, n_ctx: int, *fake: str) -> subprocess.Popen[bytes]:
    """Start a daemon with an engine that a file configures; forget what it told of that."""
    configure(box, n_ctx, *fake)
    daemon = box.start("--config", str(box.root / "config.toml"))
    manager.until("READY=1")
    return daemon


def configure(box: Sandbox, n_ctx: int, *fake: str) -> None:
    """Write the file."""
    engine = {"model": str(box.model), "engine_path": str(FAKE_ENGINE), "port": box.port}
    engine |= {"n_ctx": n_ctx, "n_seq": 2, "extra_args": list(fake)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in engine.items()]
    (box.root / "config.toml").write_text("\n".join(["[engine]", *lines]))
    (box.root / "config.toml").chmod(0o600)


def reported(manager: Manager) -> list[str]:
    """Return what is told of a reload, but for the time that it may take."""
    return [message for message in manager.until("READY=1") if message != EXTEND]


@pytest.mark.parametrize("how", ["signal", "request"])
def test_a_reload_is_told_whoever_asked_for_it(box: Sandbox, manager: Manager, how: str) -> None:
    daemon = configured(box, manager, 16384)
    configure(box, 32768)
    if how == "signal":
        daemon.send_signal(signal.SIGHUP)
    else:
        box.client.reload()
    assert reported(manager) == [
        "RELOADING=1\nMONOTONIC_USEC=N",
        "STATUS=reconfiguring: 16384 tokens over 2 slots, engine pid N",
        "READY=1\nSTATUS=ready: 32768 tokens over 2 slots, engine pid N",
    ]


def test_a_reload_that_changes_nothing_is_told_as_well(box: Sandbox, manager: Manager) -> None:
    configured(box, manager, 16384).send_signal(signal.SIGHUP)
    assert reported(manager) == ["RELOADING=1\nMONOTONIC_USEC=N", READY]


def test_a_reload_that_was_refused_says_why_in_the_status(box: Sandbox, manager: Manager) -> None:
    daemon = configured(box, manager, 16384, "--fake-refuse", "insufficient_memory")
    configure(box, 131072, "--fake-refuse", "insufficient_memory")
    daemon.send_signal(signal.SIGHUP)
    assert reported(manager) == [
        "RELOADING=1\nMONOTONIC_USEC=N",
        "STATUS=reconfiguring: 16384 tokens over 2 slots, engine pid N",
        f"{READY}; reload refused: refused: insufficient_memory",
    ]


def test_the_clock_of_a_reload_is_the_managers(box: Sandbox, manager: Manager) -> None:
    """It goes by it to tell this reload from an earlier one."""
    daemon = configured(box, manager, 16384)
    before = time.monotonic_ns() // 1000
    daemon.send_signal(signal.SIGHUP)
    name, _, usec = manager.message().splitlines()[1].partition("=")
    assert name == "MONOTONIC_USEC"
    assert before <= int(usec) <= time.monotonic_ns() // 1000


def test_a_reload_while_the_engine_loads_does_not_make_it_ready(
    box: Sandbox, manager: Manager
) -> None:
    configure(box, 16384, "--fake-load-s", "4")
    daemon = box.start("--config", str(box.root / "config.toml"))
    daemon.send_signal(signal.SIGHUP)
    until(lambda: "not reloaded" in box.daemon_log())
    said = manager.until("READY=1")
    assert said == ["STATUS=starting", EXTEND, STARTING, EXTEND, READY]


def test_a_reload_that_waits_for_the_engine_asks_for_more_time(
    box: Sandbox, manager: Manager
) -> None:
    slow = ("--fake-reconfigure-s", "2.5")
    daemon = configured(box, manager, 16384, *slow)
    configure(box, 32768, *slow)
    daemon.send_signal(signal.SIGHUP)
    assert manager.until("EXTEND")[-1] == EXTEND
    assert manager.message() == EXTEND, "and again"
    assert manager.until("READY=1")[-1].startswith("READY=1\nSTATUS=ready: 32768")


def test_two_reloads_at_once_come_to_the_same(box: Sandbox, manager: Manager) -> None:
    """As systemd does it: a signal, and a request that waits for the outcome."""
    daemon = configured(box, manager, 16384)
    engine = psutil.Process(box.engine_pid())
    configure(box, 32768)
    engine.suspend()
    daemon.send_signal(signal.SIGHUP)
    until(lambda: box.client.status().state is EngineState.RECONFIGURING)
    second = box.client.reload()
    until(lambda: box.daemon_log().count("reload of") == 2)
    engine.resume()
    result = box.client.wait_operation(second, timeout_s=WITHIN_S).result
    assert isinstance(result, ReloadResult)
    assert (result.unchanged, result.applied) == (True, ())
    status = box.client.status()
    assert status.engine is not None
    assert status.engine.geometry is not None
    assert (status.engine.geometry.n_ctx, status.loads_avoided) == (32768, 1)


def test_two_reloads_at_once_are_both_refused(box: Sandbox, manager: Manager) -> None:
    twice = ("--fake-refuse", *["insufficient_memory"] * 2)
    daemon = configured(box, manager, 16384, *twice)
    engine = psutil.Process(box.engine_pid())
    configure(box, 32768, *twice)
    engine.suspend()
    daemon.send_signal(signal.SIGHUP)
    until(lambda: box.client.status().state is EngineState.RECONFIGURING)
    second = box.client.reload()
    engine.resume()
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(second, timeout_s=WITHIN_S)
    assert (caught.value.code, caught.value.exit_code) == ("insufficient_memory", 5)


def test_an_engine_that_was_given_up_is_a_daemon_that_waits_for_a_person(
    box: Sandbox, manager: Manager
) -> None:
    wanted(box, "--fake-load-exit", "3")
    daemon = box.start()
    why = "the engine exited with status 3 while it was starting"
    said = manager.until("READY=1")
    texts = [message for message in said if message != EXTEND]
    assert texts == [
        "STATUS=starting",
        STARTING,
        f"STATUS=crashed: {why}",
        f"STATUS=starting: {why}",
        f"STATUS=starting: {why}, engine pid N",
        f"READY=1\nSTATUS=failed: {why}",
    ]
    assert daemon.poll() is None
    assert box.client.status().state is EngineState.FAILED


def test_on_failed_exit_ends_the_daemon_without_ever_being_ready(
    box: Sandbox, manager: Manager
) -> None:
    box.env["LLAMACTL_ON_FAILED"] = "exit"
    wanted(box, "--fake-load-exit", "3")
    daemon = box.spawn()
    assert daemon.wait(WITHIN_S) == 3
    assert not [said for said in manager.until("STATUS=failed") if "READY" in said]
    assert store.load(box.paths.state_file)[0].intent is Intent.UP
    assert [path.name for path in box.paths.runtime.iterdir()] == ["daemon.lock"]


def test_a_stop_is_extended_while_it_goes_on(box: Sandbox, manager: Manager) -> None:
    daemon = started(box, manager, "--fake-ignore-term")
    daemon.terminate()
    said = manager.until("STATUS=stopped")
    assert EXTEND in said
    assert [message for message in said if message != EXTEND] == [
        "STOPPING=1\n" + STOPPING.format(f"{CARRYING[0]}, "),
        *(STOPPING.format(f"{text}, ") for text in CARRYING[1:]),
        STOPPING.format(""),
        "STATUS=stopped",
    ]
    assert daemon.wait(WITHIN_S) == 0
    assert box.leftovers() == []


def test_usr2_hands_the_engine_over(box: Sandbox, manager: Manager) -> None:
    daemon = started(box, manager)
    pid = box.engine_pid()
    daemon.send_signal(signal.SIGUSR2)
    assert daemon.wait(WITHIN_S) == 0
    assert manager.until("STOPPING=1") == [f"STOPPING=1\nSTATUS=ready: {HANDED_OVER}"]
    saved, _ = store.load(box.paths.state_file)
    assert saved.intent is Intent.UP
    assert saved.process is not None
    assert saved.process.engine.pid == pid

    box.start()
    said = manager.until("READY=1")
    assert [message for message in said if message != EXTEND] == [STARTING, READY]
    status = box.client.status()
    assert status.engine is not None
    assert (status.engine.pid, status.engine.adopted) == (pid, True)
    assert status.weight_loads == 1


def test_a_hand_over_waits_for_the_end_of_a_change(box: Sandbox, manager: Manager) -> None:
    """Whoever asked for it is told, and the next daemon knows what was set."""
    daemon = started(box, manager)
    engine = psutil.Process(box.engine_pid())
    engine.suspend()
    operation = box.client.reconfigure(n_ctx=131072, n_seq=4)
    daemon.send_signal(signal.SIGUSR2)
    manager.until("STOPPING=1")
    with pytest.raises(Exception, match="shutting down"):
        box.client.stop()
    assert daemon.poll() is None
    engine.resume()
    result = box.client.wait_operation(operation, timeout_s=WITHIN_S).result
    assert isinstance(result, Receipt)
    assert daemon.wait(WITHIN_S) == 0
    assert engine.is_running()
    saved, _ = store.load(box.paths.state_file)
    assert saved.override is not None
    assert (saved.override.n_ctx, saved.override.n_seq) == (131072, 4)


def test_term_after_usr2_is_a_full_stop(box: Sandbox, manager: Manager) -> None:
    daemon = started(box, manager)
    engine = psutil.Process(box.engine_pid())
    engine.suspend()
    box.client.reconfigure(n_ctx=131072)
    daemon.send_signal(signal.SIGUSR2)
    manager.until("STOPPING=1")
    daemon.terminate()
    until(lambda: box.client.status().intent is Intent.DOWN)
    engine.resume()
    assert daemon.wait(WITHIN_S) == 0
    assert store.load(box.paths.state_file)[0].intent is Intent.DOWN
    assert box.processes() == []


def fed_at(manager: Manager) -> float:
    """Return when the watchdog is fed next."""
    while manager.message() != "WATCHDOG=1":
        pass
    return time.monotonic()


def test_the_watchdog_is_fed_at_half_its_time_whatever_the_engine_does(
    box: Sandbox, manager: Manager
) -> None:
    box.env["WATCHDOG_USEC"] = "400000"
    box.start()
    box.up()
    engine = psutil.Process(box.engine_pid())
    manager.until("STATUS=ready")
    engine.suspend()
    fed = [fed_at(manager) for _ in range(12)]
    gaps = [after - before for before, after in pairwise(fed)]
    assert median(gaps[-6:]) < 0.4, "the first ones were waiting already"
    assert fed[-1] - fed[0] > 0.5, "not at every turn of the loop"
    engine.resume()


def test_what_is_meant_for_the_daemon_is_not_handed_on(box: Sandbox, manager: Manager) -> None:
    mine = {"WATCHDOG_USEC": "30000000", "LISTEN_FDS": "0", "LISTEN_PID": "1", "LISTEN_FDNAMES": ""}
    box.env |= mine
    started(box, manager)
    engine = box.client.status().engine
    assert engine is not None
    assert engine.holder_pid is not None
    for pid in (engine.pid, engine.holder_pid):
        env = psutil.Process(pid).environ()
        assert not {"NOTIFY_SOCKET", "WATCHDOG_PID", *mine} & set(env)


@pytest.mark.parametrize("address", ["nonsense", "/nowhere/notify", "@" + "x" * 200])
def test_a_manager_that_cannot_be_told_is_no_reason_to_fail(box: Sandbox, address: str) -> None:
    box.env |= {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "soon"}
    box.start()
    assert box.up() > 0
    assert "notify" in box.daemon_log()


def test_an_abstract_name_is_as_good_as_a_path() -> None:
    with contextlib.closing(Manager(f"@llamactl-test-{os.getpid()}")) as manager:
        env = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "4000000", "OTHER": "stays"}
        with contextlib.closing(Notifier.take_from(env)) as notifier:
            assert notifier.send("READY=1")
            assert notifier.watchdog_s == 4.0
        assert manager.message() == "READY=1"
        assert env == {"OTHER": "stays"}


def test_a_text_cannot_bring_a_line_of_its_own(tmp_path: Path) -> None:
    with contextlib.closing(Manager.at(tmp_path / "n")) as manager:
        env = {"NOTIFY_SOCKET": manager.address}
        with contextlib.closing(Notifier.take_from(env)) as notifier:
            notifier.send("STATUS=failed: no /model\nREADY=1\x1b[2J", "STOPPING=1")
        assert manager.message() == "STATUS=failed: no /model READY=1 [2J\nSTOPPING=1"


def test_the_watchdog_of_another_process_is_not_ours() -> None:
    env = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    with contextlib.closing(Notifier.take_from(env)) as notifier:
        assert notifier.watchdog_s is None


def test_without_a_manager_nothing_is_said_and_nothing_fails() -> None:
    with contextlib.closing(Notifier.take_from({})) as notifier:
        assert not notifier
        assert notifier.send("READY=1")
