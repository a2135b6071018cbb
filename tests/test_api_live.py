"""A daemon over the real engine: keys that open and are shown nowhere, metrics that go on."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from live_engine import PATIENT_THREADS
from llamactl_supervisor import keys
from llamactl_supervisor.engine_metrics import ENGINE_METRICS, PREFIX, WITH_DRAFT
from llamactl_supervisor.models import EngineRequest, EngineState, Operation, Receipt, UpRequest
from prometheus_client.parser import text_string_to_metric_families
from sandbox import WITHIN_S, until
from tcp_box import ADMIN, READ, TcpBox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FILE_KEY, ENV_KEY = "key-of-the-users-file", "key-of-the-environment"
LOAD_S = 60.0


class LiveBox(TcpBox):
    """A sandbox with the real engine."""

    def __init__(self, engine: Path, model: Path) -> None:
        super().__init__()
        self.env |= PATIENT_THREADS
        self.engine, self.model = engine, model

    def serve(self, *options: str, key_file: Path | None = None) -> None:
        """Run the engine until it is ready."""
        spec = EngineRequest(
            model=str(self.model),
            n_ctx=2048,
            n_seq=2,
            port=self.port,
            extra_args=("--no-ui", *options),
            api_key_file=None if key_file is None else str(key_file),
        )
        operation = self.client.up(UpRequest(spec=spec, engine_path=str(self.engine)))
        self.client.wait_operation(operation, timeout_s=LOAD_S)

    def complete(self, key: str | None, *, slot: int = 0) -> int:
        """Let the engine write eight tokens; return its status."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = {"prompt": "The fox", "n_predict": 8, "id_slot": slot, "ignore_eos": True}
        url = f"http://127.0.0.1:{self.port}/completion"
        return httpx.post(url, json=body, headers=headers, timeout=LOAD_S).status_code

    def scrape(self) -> dict[str, float]:
        """Return every sample by its name and its labels' values."""
        return {
            " ".join((sample.name, *sample.labels.values())): sample.value
            for family in text_string_to_metric_families(self.metrics())
            for sample in family.samples
        }

    def engine_dir(self) -> Path:
        """Return the private directory of the engine that runs."""
        status = self.client.status().engine
        assert status is not None
        return self.paths.engine_dir(status.instance_id)

    def props(self) -> Any:
        """Ask the engine itself."""
        transport = httpx.HTTPTransport(uds=str(self.engine_dir() / "engine.sock"))
        with httpx.Client(transport=transport, timeout=WITHIN_S) as client:
            return client.get("http://engine/props").raise_for_status().json()


@contextmanager
def live_box(engine: Path, model: Path) -> Iterator[LiveBox]:
    sandbox = LiveBox(engine, model)
    try:
        yield sandbox
    finally:
        sandbox.close()


@pytest.fixture
def box(engine_path: Path, model_path: Path) -> Iterator[LiveBox]:
    with live_box(engine_path, model_path) as sandbox:
        yield sandbox


def shown(box: LiveBox) -> dict[str, str]:
    """Return everything that anybody could be shown, by where it is found."""
    found = {
        "status": box.client.status().model_dump_json(),
        "status over TCP": box.ask("GET", "/v1/status").text,
        "ledger": box.client.ledger().model_dump_json(),
        "logs": "\n".join(box.client.logs(lines=100_000)),
        "metrics": box.metrics(),
        "daemon log": box.daemon_log(),
    }
    for process in box.processes():
        found[f"ps {process.pid}"] = " ".join(process.cmdline())
    for directory in (box.paths.state, box.paths.runtime):
        for path in directory.rglob("*"):
            if path.is_file() and path.name != keys.FILE_NAME:
                found[str(path)] = path.read_text(errors="replace")
    return found


def test_keys_open_what_they_should_and_are_shown_nowhere(box: LiveBox) -> None:
    """Probes, changes, pages and scrapes go on with a key that was rotated, or is gone."""
    users = box.root / "keys"
    users.write_text(f"# the team's\n{FILE_KEY}\n")
    box.env["LLAMA_API_KEY"] = ENV_KEY
    daemon = box.start()
    box.serve("-v", key_file=users)
    private = keys.ours(box.engine_dir())
    assert private is not None
    assert [box.complete(key) for key in (None, "wrong", FILE_KEY, ENV_KEY)] == [401, 401, 200, 200]
    users.write_text("rotated\n")
    assert box.complete("rotated") == 401, "the engine reads its keys once"

    daemon.send_signal(signal.SIGKILL)
    daemon.wait(WITHIN_S)
    del box.env["LLAMA_API_KEY"]
    box.start()
    box.until_state(EngineState.READY)
    receipt = box.client.wait_operation(box.client.reconfigure(n_ctx=4096), timeout_s=LOAD_S).result
    assert isinstance(receipt, Receipt)
    assert receipt.outcome == "applied"
    box.client.wait_operation(box.client.page_out("fox", 0), timeout_s=LOAD_S)
    assert [page.name for page in box.client.pages().pages] == ["fox"]
    assert len(box.client.slots().slots) == 2
    found = box.scrape()
    assert (found["llamactl_engine_scrape_ok"], found["llamacpp:page_store_pages"]) == (1, 1)

    texts = shown(box)
    os.kill(box.engine_pid(), signal.SIGKILL)
    until(lambda: box.client.status().last_exit)
    until(lambda: box.client.status().state is EngineState.READY, within_s=LOAD_S)
    assert keys.ours(box.engine_dir()) not in (None, private)
    assert [box.complete(key) for key in (FILE_KEY, "rotated")] == [401, 200]
    texts |= {f"{name}, after the crash": text for name, text in shown(box).items()}
    assert "llama-server" in texts[f"ps {psutil.Process(box.engine_pid()).pid}, after the crash"]
    assert "api_keys: 3 keys loaded" in texts["logs"], "it is as verbose as it can be"
    assert "last_lines" in texts["status, after the crash"]
    secrets = [FILE_KEY, ENV_KEY, private, keys.ours(box.engine_dir()) or "", ADMIN, READ]
    for secret in (*secrets, "rotated"):
        assert [name for name, text in texts.items() if secret in text] == [], secret


def test_an_open_engine_stays_open_and_its_counters_go_on(box: LiveBox) -> None:
    box.start()
    box.serve()
    assert not (box.engine_dir() / keys.FILE_NAME).exists()
    assert box.complete(None) == 200
    before = box.scrape()
    assert before["llamacpp:tokens_predicted_total"] == 8
    assert before["llamacpp:kv_cells_total"] == 2048
    described = {
        (f"{PREFIX}{metric.name}", metric.type, metric.help)
        for metric in ENGINE_METRICS
        if metric.name != WITH_DRAFT
    }
    families = list(text_string_to_metric_families(box.metrics()))
    assert described == {
        (
            f"{family.name}_total" if family.type == "counter" else family.name,
            *(family.type, family.documentation),
        )
        for family in families
        if family.name.startswith(PREFIX)
    }

    counted = {
        sample.name
        for family in families
        for sample in family.samples
        if family.type in ("counter", "histogram") and family.name.startswith(PREFIX)
    }
    changes: tuple[Callable[[], Operation], ...] = (
        box.client.restart,
        lambda: box.client.reconfigure(n_ctx=4096),
    )
    for change in changes:
        box.client.wait_operation(change(), timeout_s=LOAD_S)
        assert box.complete(None) == 200
        after = box.scrape()
        backward = [
            name
            for name, value in after.items()
            if name.split(" ")[0] in counted and value < before[name]
        ]
        assert backward == []
        before = after
    assert before["llamacpp:tokens_predicted_total"] == 24
    assert before["llamacpp:weight_loads_total"] == 2
    assert before["llamacpp:reconfigure_pause_seconds_count"] == 1


def test_a_scrape_lets_a_sleeper_sleep(box: LiveBox) -> None:
    box.start()
    box.serve("--sleep-idle-seconds", "1")
    assert box.complete(None) == 200
    assert box.scrape()["llamacpp:tokens_predicted_total"] == 8
    until(lambda: box.props()["is_sleeping"])
    found = [box.scrape() for _ in range(3)][-1]
    assert (found["llamactl_engine_scrape_ok"], found["llamacpp:weight_loads_total"]) == (1, 1)
    assert box.props()["is_sleeping"]
    assert box.complete(None) == 200
    woken = box.scrape()
    assert woken["llamacpp:tokens_predicted_total"] == 16
    assert woken["llamacpp:weight_loads_total"] == 2
