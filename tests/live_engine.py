"""A real llama-server without a daemon, on a TCP port too, as urgent as the tests themselves."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from llamactl_validate.asked import Answer, Json
from llamactl_validate.engine import N_CTX, N_SEQ, PATIENT_THREADS, TRIES, Engine, Generation
from llamactl_validate.suites.cycles import resident
from sandbox import WITHIN_S, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import httpx

__all__ = [
    "N_CTX",
    "N_SEQ",
    "PATIENT_THREADS",
    "TRIES",
    "Answer",
    "Faulty",
    "Generation",
    "Json",
    "LiveEngine",
    "live_engine",
    "resident",
]
PATIENCE_S = 4 * WITHIN_S
"""For a prompt of thousands of tokens on a machine with other work to do."""
_STATE_HEAD_BYTES = 8
"""Magic and sequence id, with which a state in memory begins."""


class LiveEngine(Engine):
    """Asked through its TCP port; `unix` is the private door."""

    def __init__(
        self, engine: Path, model: Path | None, *options: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        super().__init__(
            engine, model, *options, patience_s=PATIENCE_S, env=env, port=self.port, idle=False
        )
        self.root = self.place.path

    @property
    def tcp(self) -> httpx.Client:
        """The public door."""
        return self.http

    def saved_state_bytes(self, slot: int) -> int:
        """Return the size of a slot's state, as it is in memory."""
        return len(self.saved_state(slot)) + _STATE_HEAD_BYTES


class Faulty:
    """An engine that fails at the steps that are written to a file."""

    def __init__(self, live: LiveEngine, faults: Path) -> None:
        self.live = live
        self._faults = faults

    def inject(self, *steps: str) -> None:
        """From the next change or page verb on, fail at these steps and no others."""
        self._faults.write_text("".join(f"{step}\n" for step in steps))


@contextlib.contextmanager
def live_engine(
    engine: Path, model: Path | None, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[LiveEngine]:
    """Yield an engine that has loaded its model; it must not have died before the end."""
    live = LiveEngine(engine, model, *options, env=env)
    try:
        yield live
    finally:
        live.close()
