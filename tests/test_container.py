"""The container's life: what dies with what, who reaps, and what becomes of a new configuration."""

from __future__ import annotations

import signal
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from container import IMAGE, Container
from llamactl_supervisor.errors import ExitCode
from sandbox import until

if TYPE_CHECKING:
    from collections.abc import Iterator

DAEMON = ("llamactl_supervisor", "serve", "--watch")
ENGINE = ("/opt/engine/llama-server", "--model")
GRACE_S = 20
"""Nothing is to be written out here: far below terminationGracePeriodSeconds."""


@pytest.fixture
def container() -> Iterator[Container]:
    with closing(Container()) as container:
        yield container


@pytest.fixture
def ready(container: Container) -> Container:
    container.start()
    container.until_ready()
    return container


def loads(container: Container) -> int:
    """Return how often weights were loaded, for whichever reason."""
    return int(container.llamactl("ledger")["totals"]["weight_loads"])


def geometry(container: Container) -> tuple[int, int]:
    """Return the live context and slots."""
    found: dict[str, Any] = container.llamactl("status")["engine"]["geometry"]
    return found["n_ctx"], found["n_seq"]


def test_it_runs_as_the_image_says(ready: Container) -> None:
    """Process 1 is the init; nothing has a capability, and nothing was written beside a volume."""
    assert psutil.Process(ready.leader).cmdline() == [*IMAGE.entrypoint, *IMAGE.cmd]
    assert {process.uids().real for process in ready.processes()} == {IMAGE.uid}
    assert ready.capabilities() == {0}
    assert (ready.probe("/livez"), ready.probe("/v1/status")) == (200, 404)
    assert geometry(ready) == (16384, 2)
    assert ready.inside("find", "/tmp", "/var/tmp", "-mindepth", "1") == ""


def test_a_dead_daemon_is_replaced_and_the_engine_lives(ready: Container) -> None:
    daemon, engine = ready.pid_of(*DAEMON), ready.pid_of(*ENGINE)
    assert daemon != engine != 0
    psutil.Process(daemon).kill()
    until(lambda: ready.pid_of(*DAEMON) not in {0, daemon})
    ready.until_ready()
    assert ready.pid_of(*ENGINE) == engine
    assert loads(ready) == 1
    until(lambda: not ready.zombies())


def test_a_dead_engine_is_loaded_again_and_reaped(ready: Container) -> None:
    """Its holder, whose parent was the dead daemon, is the init's child: reaped by it."""
    daemon, engine = ready.pid_of(*DAEMON), ready.pid_of(*ENGINE)
    psutil.Process(daemon).kill()
    until(lambda: ready.pid_of(*DAEMON) not in {0, daemon})
    ready.until_ready()
    psutil.Process(engine).kill()
    until(lambda: ready.pid_of(*ENGINE) not in {0, engine})
    ready.until_ready()
    assert loads(ready) == 2
    until(lambda: not ready.zombies())


def test_term_ends_everything_in_time_and_for_now(ready: Container) -> None:
    """The engine was asked, not killed: a crash would be on record. The next container loads it."""
    processes = ready.processes()
    ready.signal(signal.SIGTERM)
    assert ready.exit_status(GRACE_S) == 0
    assert not any(process.is_running() for process in processes)
    assert list((ready.home / "state" / "state" / "crashes").iterdir()) == []
    ready.start()
    ready.until_ready()
    assert loads(ready) == 2


def test_a_new_config_map_is_a_reconfigure(ready: Container) -> None:
    """Of the engine that runs; the readiness probe sees nothing of it."""
    engine, seen = ready.pid_of(*ENGINE), set()
    ready.configure(n_ctx="32k", n_seq=4)

    def applied() -> bool:
        seen.add(ready.probe("/readyz"))
        return geometry(ready) == (32768, 4)

    until(applied)
    assert seen == {200}
    assert (ready.pid_of(*ENGINE), loads(ready)) == (engine, 1)


def test_a_broken_config_map_changes_nothing_and_is_told(ready: Container) -> None:
    engine = ready.pid_of(*ENGINE)
    ready.configure(n_ctx="much")
    until(lambda: "llamactl_config_ok 0.0" in ready.metrics())
    assert (ready.pid_of(*ENGINE), geometry(ready)) == (engine, (16384, 2))
    assert ready.probe("/readyz") == 200
    ready.configure(n_seq=3)
    until(lambda: geometry(ready)[1] == 3)
    assert "llamactl_config_ok 1.0" in ready.metrics()


def test_a_killed_container_comes_back_with_the_live_geometry(ready: Container) -> None:
    """What the dead one left in the volumes, sockets and pids included, misleads nobody."""
    assert ready.llamactl("reconfigure", "--n-seq", "4")["outcome"] == "applied"
    ready.signal(signal.SIGKILL)
    assert ready.exit_status() != 0
    ready.start()
    ready.until_ready()
    assert geometry(ready) == (16384, 4)
    assert loads(ready) == 2


def test_a_state_that_was_opened_to_the_group_is_refused(ready: Container) -> None:
    """As the kubelet opens it where fsGroupChangePolicy is not OnRootMismatch."""
    ready.signal(signal.SIGTERM)
    assert ready.exit_status(GRACE_S) == 0
    (ready.home / "state" / "state").chmod(0o2770)
    ready.start()
    assert ready.exit_status() == ExitCode.REFUSED
    assert "insecure_directory: /var/lib/llamactl/state" in ready.log.read_text()


def test_an_engine_that_is_given_up_ends_the_container(container: Container) -> None:
    """So that whoever restarts it waits longer each time, and shows it."""
    container.configure("--fake-load-exit", "9")
    container.start()
    assert container.exit_status() == ExitCode.NOT_RUNNING


def test_a_container_without_a_sound_configuration_says_so(container: Container) -> None:
    container.configure(n_ctx="much")
    container.start()
    assert container.exit_status() == ExitCode.USAGE
    assert "config_invalid: file /etc/llamactl/config.toml, engine.n_ctx=" in (
        container.log.read_text()
    )
