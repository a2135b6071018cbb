"""A sandbox whose engine is the real one."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
from live_engine import PATIENT_THREADS
from llamactl_supervisor.models import EngineRequest, EngineState, UpRequest
from sandbox import Sandbox, until

if TYPE_CHECKING:
    from pathlib import Path

    from llamactl_supervisor.models import Status

PATIENCE_S = 120.0
"""How long the real engine may take for anything on a busy machine."""
STOP_TERM_S = 2.0
IDLE_S = 3.0
"""How long an engine may stand still in these tests: a tenth of the default."""
CRASHES_MAX = 20


class Live(Sandbox):
    """A sandbox whose engine is the real one."""

    def __init__(self, engine: Path, model: Path, **settings: object) -> None:
        times = {"stop_term_s": STOP_TERM_S, "wedge_idle_s": IDLE_S, "probe_s": 0.5}
        super().__init__(**times, crashes_max=CRASHES_MAX, **settings)
        self.env |= PATIENT_THREADS
        self.engine, self.weights = engine, model
        self.pool = ThreadPoolExecutor(4)

    def up_real(self, *extra: str, n_ctx: int = 8192, n_seq: int = 2) -> int:
        """Bring the real engine up; return its pid."""
        operation = self.client.up(self.request_real(*extra, n_ctx=n_ctx, n_seq=n_seq))
        self.client.wait_operation(operation, timeout_s=PATIENCE_S)
        return self.engine_pid()

    def request_real(self, *extra: str, n_ctx: int, n_seq: int) -> UpRequest:
        """Return a request for the real engine."""
        spec = EngineRequest(
            model=str(self.weights), n_ctx=n_ctx, n_seq=n_seq, port=self.port, extra_args=extra
        )
        return UpRequest(spec=spec, engine_path=str(self.engine))

    def until_generation(self, generation: int) -> Status:
        """Wait until an engine of this generation is ready."""

        def ready() -> Status | None:
            status = self.client.status()
            there = (status.generation, status.state) == (generation, EngineState.READY)
            return status if there else None

        status = until(ready, within_s=PATIENCE_S)
        assert status is not None
        return status

    def complete(self, **body: object) -> dict[str, Any]:
        """Ask the engine on its public port."""
        url = f"http://127.0.0.1:{self.port}/completion"
        answer = httpx.post(url, json=body, timeout=PATIENCE_S).raise_for_status()
        done: dict[str, Any] = answer.json()
        return done

    def stream(self, chunks: list[str], **body: object) -> dict[str, Any]:
        """Stream a completion into `chunks`; return its last event, which may be an error."""
        url = f"http://127.0.0.1:{self.port}/completion"
        last: dict[str, Any] = {}
        wanted = body | {"stream": True}
        with httpx.stream("POST", url, json=wanted, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    chunks.append(last.get("content", ""))
        return last

    def causes(self) -> list[str]:
        """Return the causes of the loads in the ledger."""
        lines = map(json.loads, self.paths.ledger_file.read_text().splitlines())
        return [
            line.get("cause", "avoided")
            for line in lines
            if line["kind"] not in {"carried", "lost"}
        ]

    def close(self) -> None:
        """End everything that is left."""
        super().close()
        self.pool.shutdown()
