"""How a `llamactl run` starts, row by row of what is promised of it, with the fake engine."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from llamactl_supervisor.models import EngineState
from run_box import LARGE, SMALL, RunBox, owner_pid, stopped
from sandbox import WITHIN_S, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[RunBox]:
    box = RunBox()
    box.start()
    yield box
    box.close()


def test_without_a_daemon_one_is_started_and_outlives_the_shim() -> None:
    box = RunBox()
    try:
        shim = box.run(*SMALL).ready()
        assert shim.props()["context_geometry"]["n_ctx"] == 8192
        assert shim.end() == 0
        status = box.client.status()
        assert status.state is EngineState.READY
        assert status.daemon.pid not in (shim.process.pid, os.getpid())
    finally:
        box.close()


def test_an_engine_is_loaded_for_who_asks_and_its_503_comes_through(box: RunBox) -> None:
    """The port listens as soon as the engine answers, and the ledger names the requester."""
    shim = box.run(*SMALL, "--fake-load-s", "1.5")
    until(shim.listens)
    assert httpx.get(f"{shim.url}/health", timeout=WITHIN_S).status_code == 503
    shim.ready()
    (line,) = until(box.ledger)
    assert line.kind == "load"
    assert (line.cause, line.by) == ("run", f"run pid {shim.process.pid}")
    assert owner_pid(box) == shim.process.pid


def test_the_engine_listens_on_its_private_socket_alone(box: RunBox) -> None:
    box.run(*SMALL).ready()
    engine = psutil.Process(box.engine_pid())
    assert not engine.net_connections("tcp")
    assert len(engine.net_connections("unix")) >= 1


def test_another_geometry_and_port_is_live_and_listens_after_the_receipt(box: RunBox) -> None:
    """The weights are loaded once; nobody ever sees the geometry from before at the new port."""
    first = box.run(*SMALL).ready()
    pid = box.engine_pid()
    assert first.end() == 0
    box_port = free_port()
    second = box.run(*LARGE, port=box_port)
    until(second.listens)
    geometry = second.props()["context_geometry"]
    assert (geometry["n_ctx"], geometry["n_seq"]) == (16384, 4)
    assert box.engine_pid() == pid
    until(lambda: box.left() == ["taken"])
    assert box.loads() == ["run"]
    assert [line.by for line in box.ledger() if line.kind == "avoided"] == [
        f"run pid {second.process.pid}"
    ]


def test_the_same_again_is_no_change_and_an_avoided_load(box: RunBox) -> None:
    assert box.run(*SMALL).ready().end() == 0
    box.run(*SMALL).ready()
    until(lambda: box.left() == ["taken"])
    lines = box.ledger()
    assert sorted(line.kind for line in lines) == ["avoided", "left", "load"]
    (avoided,) = (line for line in lines if line.kind == "avoided")
    assert (avoided.pause_ms, avoided.previous) == (0.0, avoided.geometry)


@pytest.mark.parametrize("change", ["threads", "model", "environment", "directory", "umask"])
def test_what_is_cold_is_loaded_anew(box: RunBox, change: str) -> None:
    """Also where it is the caller's process that is another, and not its command line."""
    assert box.run(*SMALL).ready().end() == 0
    pid = box.engine_pid()
    other = box.root / "other.gguf"
    other.write_bytes(b"GGUF other")
    elsewhere = box.root / "elsewhere"
    elsewhere.mkdir()
    args = {"threads": ("-t", "3"), "model": ("-m", str(other))}.get(change, ())
    env = {"OMP_NUM_THREADS": "1"} if change == "environment" else None
    cwd = elsewhere if change == "directory" else None
    prefix = ("sh", "-c", 'umask 027; exec "$@"', "sh") if change == "umask" else ()
    shim = box.run(*SMALL, *args, env=env, cwd=cwd, prefix=prefix).ready()
    assert box.engine_pid() != pid
    assert not psutil.pid_exists(pid)
    until(lambda: box.loads() == ["run", "run"])
    assert box.left() == ["replaced"]
    assert owner_pid(box) == shim.process.pid
    names = {"threads": "--threads", "model": "--model", "directory": "cwd"}
    why = (names | {"environment": "env OMP_NUM_THREADS"}).get(change, change)
    assert f"llamactl run: the engine is replaced: {why}\n" in shim.err
    reasons = [line.reasons for line in box.ledger() if line.kind == "load"]
    assert reasons == [(), (why,)]
    # The words of the engine before are those of whoever had it.
    until(lambda: "fake engine on" in shim.err)
    assert shim.err.count("fake engine on") == 1
    assert "fake engine ends" not in shim.err


def test_the_callers_process_context_is_the_engines(box: RunBox) -> None:
    elsewhere = box.root / "elsewhere"
    elsewhere.mkdir()
    cpu = min(os.sched_getaffinity(0))
    limited = f'umask 027; ulimit -n 321; exec nice -n 3 taskset -c {cpu} "$@"'
    env = {"OMP_NUM_THREADS": "7", "LLAMA_ARG_REUSE_PORT": "1", "PRIVATE_WORD": "x"}
    box.run(*SMALL, cwd=elsewhere, env=env, prefix=("sh", "-c", limited, "sh")).ready()
    pid = box.engine_pid()
    engine = psutil.Process(pid)
    assert engine.cwd() == str(elsewhere)
    assert engine.nice() == min(os.nice(0) + 3, 19)
    assert engine.cpu_affinity() == [cpu]
    with open(f"/proc/{pid}/status") as status:  # noqa: PTH123 - a file of the kernel's
        assert "Umask:\t0027" in status.read()
    with open(f"/proc/{pid}/limits") as limits:  # noqa: PTH123
        files = next(line for line in limits if line.startswith("Max open files"))
    assert files.split()[3] == "321"
    environ = engine.environ()
    assert environ["OMP_NUM_THREADS"] == "7"
    assert {"LLAMA_ARG_REUSE_PORT", "PRIVATE_WORD"}.isdisjoint(environ)


def test_what_the_daemon_may_not_give_is_told_and_nothing_is_loaded(box: RunBox) -> None:
    gone = box.root / "gone"
    gone.mkdir()
    shim = box.run(*SMALL, cwd=gone, prefix=("sh", "-c", f'rmdir {gone}; exec "$@"', "sh"))
    assert shim.process.wait(WITHIN_S) in {1, 125}
    assert str(gone) in shim.err or "directory" in shim.err
    assert stopped(box)


def test_a_secret_is_in_a_file_of_its_own_and_nowhere_else(box: RunBox) -> None:
    """Neither in the engine's arguments, nor in status, state, ledger or logs."""
    shim = box.run(*SMALL, "--api-key", "hunter2", env={"HF_TOKEN": "hunter3"}).ready()
    pid = box.engine_pid()
    engine = psutil.Process(pid)
    assert "hunter2" not in " ".join(engine.cmdline())
    assert engine.environ()["LLAMA_API_KEY"] == "hunter2"
    assert engine.environ()["HF_TOKEN"] == "hunter3"
    shown = box.client.status().model_dump_json() + box.daemon_log() + shim.err
    assert "hunter" not in shown
    (kept,) = box.paths.secrets.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    holding = [
        file
        for file in (*box.paths.state.rglob("*"), *box.paths.runtime.rglob("*"))
        if file.is_file() and b"hunter" in file.read_bytes()
    ]
    assert set(holding) == {kept}
    assert shim.end() == 0
    box.run(*SMALL, "--api-key", "hunter4", env={"HF_TOKEN": "hunter3"}).ready()
    assert box.engine_pid() != pid


def test_what_the_engine_refuses_ends_with_1_and_its_words(box: RunBox) -> None:
    first = box.run(*SMALL, "--fake-refuse", "insufficient_memory").ready()
    pid = box.engine_pid()
    assert first.end() == 0
    refused = box.run(*LARGE, "--fake-refuse", "insufficient_memory")
    assert refused.process.wait(WITHIN_S) == 1
    assert "the engine would not fit" in refused.err
    until(lambda: owner_pid(box) is None)
    status = box.client.status()
    assert (status.state, box.engine_pid()) == (EngineState.READY, pid)
    assert status.lingers_s is not None
    assert status.lingers_s < 10


def test_what_does_not_fit_is_refused_with_both_numbers(box: RunBox) -> None:
    shim = box.run(*SMALL, "--fake-needs", str(2**60))
    assert shim.process.wait(WITHIN_S) == 1
    assert f"{2**40 + 1} MiB needed, " in shim.err
    assert "MiB available" in shim.err
    assert stopped(box)
    forced = box.run(*SMALL, "--fake-needs", str(2**60), options=["--overcommit"])
    forced.ready()


def test_an_option_that_the_engine_does_not_know_is_its_own_error(box: RunBox) -> None:
    shim = box.run(*SMALL, "--no-such-option")
    assert shim.process.wait(WITHIN_S) == 1
    assert "--no-such-option" in shim.err
    assert stopped(box)


def test_a_live_owner_is_never_displaced(box: RunBox) -> None:
    """The other waits as long as owners may overlap, then names pid and port."""
    first = box.run(*SMALL).ready()
    began = time.monotonic()
    second = box.run(*LARGE)
    assert second.process.wait(WITHIN_S) == 1
    assert time.monotonic() - began >= 4.5
    assert f"pid {first.process.pid} on port {first.port}" in second.err
    assert first.props()["context_geometry"]["n_ctx"] == 8192


def test_who_starts_before_the_other_has_ended_comes_next(box: RunBox) -> None:
    """At the same port as well: the port is waited for, and taken once it is free."""
    first = box.run(*SMALL).ready()
    second = box.run(*LARGE, port=first.port)
    assert first.healthy()
    assert second.process.poll() is None
    assert first.end() == 0
    until(lambda: owner_pid(box) == second.process.pid)
    assert second.ready().props()["context_geometry"]["n_ctx"] == 16384


@pytest.mark.parametrize("whose", ["a stranger's", "another run's"])
def test_a_port_in_use_ends_with_1(box: RunBox, whose: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if whose == "another run's":
            port = box.run(*SMALL).ready().port
        shim = box.run(*LARGE, port=port)
        assert shim.process.wait(WITHIN_S) == 1
        assert f"127.0.0.1:{port} cannot be bound" in shim.err
        assert ("owns it" in shim.err) is (whose == "another run's")


def test_a_port_that_the_system_chooses_is_told(box: RunBox) -> None:
    shim = box.run(*SMALL, port=0)
    until(lambda: "--port 0: it is " in shim.err)
    port = int(shim.err.partition("--port 0: it is ")[2].split()[0])
    shim.url = f"http://127.0.0.1:{port}"
    shim.ready()
    owner = box.client.status().owner
    assert owner is not None
    assert owner.port == port
