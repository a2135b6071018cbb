"""Measures what a relaunch costs that carries its conversations over, as a client sees it.

`make bench-relaunch` holds conversations in the slots and one page of an engine under a daemon of
its own, restarts it several times, and fails where a token of theirs is prefilled again.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from llamactl_bench.asking import prompt_of
from llamactl_bench.machine import look
from llamactl_bench.spread import spread
from llamactl_bench.tables import Shown
from llamactl_builder import build, models
from llamactl_builder.progress import TerminalProgress
from llamactl_supervisor.client import Client
from llamactl_supervisor.models import EngineRequest, LifecycleResult, UpRequest
from llamactl_supervisor.paths import Paths
from llamactl_supervisor.spawn import spawn_daemon
from llamactl_validate.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llamactl_supervisor.models import Operation

N_SEQ = 3
WINDOW = 8192
PAGE = "paged"
N_VOCAB = 8192
"""Tokens that are used; the default model has more."""
KNOCK_S = 0.001
"""Pause between two tries to connect."""


@dataclass(frozen=True)
class Relaunch:
    """What one restart cost."""

    took_s: float
    closed_s: float
    quiet_s: float
    load_s: float
    kept: int
    n_bytes: int
    prefilled: int


class Knocking(threading.Thread):
    """Tries to connect to the port all the while; counts for how long it could not."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.closed_s = 0.0
        self._port, self._ended = port, threading.Event()

    def run(self) -> None:
        """Knock until told to end."""
        closed_at: float | None = None
        while not self._ended.wait(KNOCK_S):
            with socket.socket() as caller:
                refused = caller.connect_ex(("127.0.0.1", self._port)) != 0
            now = time.perf_counter()
            if refused and closed_at is None:
                closed_at = now
            elif not refused and closed_at is not None:
                self.closed_s, closed_at = self.closed_s + now - closed_at, None

    def end(self) -> float:
        """End it; return for how many seconds nobody listened."""
        self._ended.set()
        self.join()
        return self.closed_s


class Bench:
    """A daemon with the real engine, and the conversations that it holds."""

    def __init__(self, paths: Paths, engine: Path, model: Path, n_tokens: int) -> None:
        self.port = free_port()
        self.client = Client(paths)
        self.prompts = [prompt_of(n_tokens, seed, N_VOCAB) for seed in range(1, N_SEQ + 2)]
        spec = EngineRequest(
            model=str(model),
            n_ctx=WINDOW * N_SEQ,
            n_seq=N_SEQ,
            port=self.port,
            extra_args=("--cache-ram", "0", "--no-ui"),
        )
        self.wait(self.client.up(UpRequest(spec=spec, engine_path=str(engine))))

    def wait(self, operation: Operation) -> Any:
        """Return the operation's result."""
        return self.client.wait_operation(operation).result

    def ask(self, prompt: list[int], slot: int) -> int:
        """Go on with a conversation; return how many tokens were prefilled."""
        url = f"http://127.0.0.1:{self.port}/completion"
        body = {"prompt": prompt, "id_slot": slot, "n_predict": 1, "temperature": 0}
        timings = httpx.post(url, json=body, timeout=None).raise_for_status().json()["timings"]
        n: int = timings["prompt_n"]
        return n

    def converse(self) -> None:
        """Fill a page and every slot."""
        self.ask(self.prompts[N_SEQ], 0)
        self.wait(self.client.page_out(PAGE, 0))
        for slot in range(N_SEQ):
            self.ask(self.prompts[slot], slot)

    def prefilled_again(self) -> int:
        """Go on with every conversation by one token; return how many more were prefilled."""
        again = sum(self.ask([*self.prompts[slot], 100], slot) - 1 for slot in range(N_SEQ))
        self.wait(self.client.page_out("aside", 0))
        self.wait(self.client.page_in(PAGE, 0))
        again += self.ask([*self.prompts[N_SEQ], 100], 0) - 1
        self.wait(self.client.page_out(PAGE, 0))
        self.wait(self.client.page_in("aside", 0))
        return again

    def relaunch(self) -> Relaunch:
        """Restart the engine once."""
        knocking = Knocking(self.port)
        knocking.start()
        began = time.perf_counter()
        result = self.wait(self.client.restart())
        took_s = time.perf_counter() - began
        closed_s = knocking.end()
        assert isinstance(result, LifecycleResult)
        assert result.carried is not None
        return Relaunch(
            took_s=took_s,
            closed_s=closed_s,
            quiet_s=result.carried.quiet_s,
            load_s=result.load_s or 0.0,
            kept=len(result.carried.of("back")),
            n_bytes=result.carried.n_bytes,
            prefilled=self.prefilled_again(),
        )


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=600, help="of each conversation")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with TerminalProgress() as progress:
        engine = build.ensure_engine(progress=progress).path
        model = models.ensure_default_model(progress)
    root = Path(tempfile.mkdtemp(prefix="llamactl-"))
    paths = Paths(cache=root / "c", state=root / "s", runtime=root / "r")
    spawn_daemon(paths)
    try:
        bench = Bench(paths, engine, model, options.tokens)
        sys.stderr.write(f"{N_SEQ} slots and a page, {options.tokens} tokens each\n")
        bench.converse()
        runs = [bench.relaunch() for _ in range(options.repeats)]
    finally:
        with Client(paths) as client:
            client.wait_down(timeout_s=120)
        shutil.rmtree(root, ignore_errors=True)
    sys.stdout.write(f"{shown(runs)}\n\n{len(runs)} restarts; {look()}\n")
    if sum(run.prefilled for run in runs) or min(run.kept for run in runs) <= N_SEQ:
        raise SystemExit(1)


def shown(runs: Sequence[Relaunch]) -> str:
    """Return what was measured: medians, and the half of the restarts around them."""

    def seconds(name: str) -> str:
        return str(spread([getattr(run, name) for run in runs]))

    rows = (
        ("conversations kept", f"{min(run.kept for run in runs)} of {N_SEQ + 1}"),
        ("tokens of theirs prefilled again", str(sum(run.prefilled for run in runs))),
        ("MB written and read", str(spread([run.n_bytes / 1e6 for run in runs]))),
        ("restart, as its caller sees it, s", seconds("took_s")),
        ("port closed, s", seconds("closed_s")),
        ("quiet: requests wait, s", seconds("quiet_s")),
        ("load of the weights, beside that, s", seconds("load_s")),
    )
    return Shown("A relaunch that keeps its conversations", ("", "measured"), rows).markdown()


if __name__ == "__main__":
    main()
