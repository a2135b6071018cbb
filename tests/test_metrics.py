"""One scrape of a real daemon: what is ours, what is the engine's, and what neither may do."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_supervisor.models import EngineState
from prometheus_client.parser import text_string_to_metric_families
from sandbox import WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=2, crashes_max=2)
    yield sandbox
    sandbox.close()


def scrape(box: Sandbox) -> dict[str, float]:
    """Return every sample by its name and its labels' values."""
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(box.metrics())
        for sample in family.samples
    }


def test_without_an_engine_ours_are_all_there_is(box: Sandbox) -> None:
    box.start()
    found = scrape(box)
    assert found["llamactl_engine_scrape_ok"] == 0
    assert found["llamactl_engine_state stopped"] == 1
    assert found["llamactl_engine_resident_bytes"] == 0
    assert found["llamactl_operations_total reconfigure failed"] == 0
    assert found["llamactl_daemon_process_resident_memory_bytes"] > 2**20
    assert not [name for name in found if name.startswith("llamacpp:") or "_created" in name]


def test_an_engine_is_asked_when_we_are_and_never_else(box: Sandbox) -> None:
    """And its counters go on where the one before it, ended or killed, had come to."""
    box.start()
    engine = psutil.Process(box.up())
    assert [scrape(box)["llamacpp:n_decode_total"] for _ in range(3)] == [1, 2, 3]
    box.client.wait_operation(box.client.reconfigure(n_ctx=8192), timeout_s=WITHIN_S)
    found = scrape(box)
    assert found["llamacpp:n_decode_total"] == 4
    assert found["llamactl_engine_scrape_ok"] == 1
    assert found["llamactl_engine_resident_bytes"] == pytest.approx(engine.memory_info().rss, 0.5)
    assert found["llamactl_engine_committed_bytes"] > 0
    assert 0 < found["llamactl_engine_uptime_seconds"] < WITHIN_S
    assert (found["llamactl_engine_context_tokens"], found["llamactl_engine_slots"]) == (8192, 2)
    box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert scrape(box)["llamacpp:n_decode_total"] == 5
    os.kill(box.engine_pid(), signal.SIGKILL)
    until(lambda: scrape(box)["llamactl_engine_retries_total"] == 1)
    box.until_state(EngineState.READY)
    found = scrape(box)
    assert found["llamacpp:n_decode_total"] >= 6
    assert found["llamactl_engine_crashes_total"] == 1
    assert found["llamactl_engine_generation"] == 3
    assert found["llamactl_operations_total restart succeeded"] == 1
    assert found["llamactl_operations_total reconfigure succeeded"] == 1


def test_an_engine_that_does_not_answer_costs_its_own_part_only(box: Sandbox) -> None:
    box.start()
    pid = box.up()
    assert scrape(box)["llamactl_engine_scrape_ok"] == 1
    os.kill(pid, signal.SIGSTOP)
    found = scrape(box)
    assert (found["llamactl_engine_scrape_ok"], found["llamactl_engine_state ready"]) == (0, 1)
    assert "llamacpp:n_decode_total" not in found
    scrape(box)
    assert box.daemon_log().count("no metrics from the engine") == 1
    os.kill(pid, signal.SIGCONT)
    until(lambda: scrape(box)["llamactl_engine_scrape_ok"])


def test_failed_operations_and_lost_output_are_counted(box: Sandbox) -> None:
    box.start()
    box.up("--fake-refuse", "insufficient_memory")
    operation = box.client.reconfigure(n_ctx=8192)
    until(lambda: box.client.operation(operation.id).error)
    found = scrape(box)
    assert found["llamactl_operations_total reconfigure failed"] == 1
    assert found["llamactl_operations_total up succeeded"] == 1


def test_output_that_no_disk_took_is_counted(box: Sandbox) -> None:
    box.start()
    box.up("--fake-flood", "20000")
    until(lambda: box.paths.engine_log.stat().st_size > 20000)
    status = box.client.status().engine
    assert status is not None
    assert status.holder_pid is not None
    full = box.paths.engine_log.stat().st_size
    psutil.Process(status.holder_pid).rlimit(psutil.RLIMIT_FSIZE, (full, full))
    assert scrape(box)["llamactl_engine_log_dropped_bytes_total"] == 0
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    dropped = scrape(box)["llamactl_engine_log_dropped_bytes_total"]
    assert dropped == len("2026-01-01T00:00:00.000Z stderr fake engine ends\n")
