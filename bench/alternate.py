"""What an orchestrator's alternation costs: one model, two command lines, TERM, wait, start.

The same loop twice: with `llamactl run -- llama-server ARGS`, and with `llama-server ARGS`. Two
conversations go on over all of it, a turn in each after every start; what a turn makes the engine
read again of what it had read before is the price. `make bench-alternate` prints one
table and every pause, and ends with 1 where the counts are not what is promised.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import httpx
from llamactl_bench.machine import look
from llamactl_bench.tables import Shown
from llamactl_builder import build, models
from llamactl_builder.progress import TerminalProgress
from llamactl_validate.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMMAND = (sys.executable, "-P", "-m", "llamactl_cli")
LINES = (("-c", "8192", "-np", "2"), ("-c", "16384", "-np", "3"))
PLAIN = ("--cache-ram", "0", "--no-ui", "--no-warmup")
TURN = " And then? Tell me more about that, in other words."
N_PREDICT = 8
POLL_S = 0.01


@dataclass
class Cost:
    """What one loop has cost. `again` are tokens that had been read before."""

    name: str
    wall_s: float = 0.0
    start_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    again: int = 0
    loads: int = 0
    pauses_ms: list[float] = field(default_factory=list)


class Conversation:
    """A prompt that grows, and how much of it the engine had read by the last turn."""

    def __init__(self, number: int, sentences: int) -> None:
        self.tokens: list[int] = []
        self.text = f"Story {number}." + "".join(
            f" The {number * 7919 + each * 31 % 997}th fox jumps." for each in range(sentences)
        )

    def turn(self, http: httpx.Client) -> tuple[float, int]:
        """Take a turn; return how long it took, and how many tokens were read a second time."""
        new = http.post("/tokenize", json={"content": self.text + TURN}).json()["tokens"]
        body = {"prompt": self.tokens + new, "n_predict": N_PREDICT, "cache_prompt": True}
        body |= {"temperature": 0.0, "return_tokens": True, "ignore_eos": True}
        began = time.monotonic()
        answer = http.post("/completion", json=body).raise_for_status().json()
        took_s = time.monotonic() - began
        # The last token that was sampled is in no cache: to read it is no repetition.
        known = max(0, len(self.tokens) - 1)
        again = max(0, answer["timings"]["prompt_n"] - (len(body["prompt"]) - known))
        self.tokens = body["prompt"] + answer["tokens"]
        self.text = ""
        return took_s, again


def alternate(
    cost: Cost, command: Sequence[str], env: Mapping[str, str], rounds: int, sentences: int
) -> None:
    """Start, take a turn in each conversation, TERM and wait, so many times."""
    talks = [Conversation(number, sentences) for number in (1, 2)]
    began = time.monotonic()
    for number in range(rounds + 1):
        port = free_port()
        started = time.monotonic()
        server = subprocess.Popen(
            [*command, *LINES[number % 2], "--port", str(port)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None) as http:
                await_health(server, http)
                start_s = time.monotonic() - started
                turns = [talk.turn(http) for talk in talks]
        finally:
            server.terminate()
            server.wait()
        if number:  # the first start has nothing to keep
            cost.start_s.append(start_s)
            cost.answer_s += [took_s for took_s, _ in turns]
            cost.again += sum(again for _, again in turns)
        sys.stderr.write(f"{cost.name}: {number} of {rounds}\n")
        if number == 0:
            began = time.monotonic()
    cost.wall_s = time.monotonic() - began


def await_health(server: subprocess.Popen[bytes], http: httpx.Client) -> None:
    """Return once it answers 200, as an orchestrator waits for it."""
    while True:
        if server.poll() is not None:
            raise SystemExit(f"the server exited with {server.returncode}")
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_S)


def supervised(
    engine: Path, model: Path, options: Sequence[str], given: argparse.Namespace
) -> Cost:
    """Measure the loop with `llamactl run`."""
    cost, root = Cost("llamactl run"), Path(tempfile.mkdtemp(prefix="llamactl-"))
    names = {"STATE": "s", "RUNTIME": "r", "CACHE": "c"}
    env = os.environ | {f"LLAMACTL_{name}_DIR": str(root / part) for name, part in names.items()}
    try:
        command = [*COMMAND, "run", "--", str(engine), "-m", str(model), *options]
        alternate(cost, command, env, given.rounds, given.sentences)
        for line in (root / "s" / "ledger.jsonl").read_text().splitlines():
            entry: dict[str, Any] = json.loads(line)
            cost.loads += entry["kind"] == "load"
            cost.pauses_ms += [entry["pause_ms"]] if entry["kind"] == "avoided" else []
    finally:
        subprocess.run([*COMMAND, "down"], env=env, stdout=subprocess.DEVNULL, check=False)
        shutil.rmtree(root, ignore_errors=True)
    return cost


def plain(engine: Path, model: Path, options: Sequence[str], given: argparse.Namespace) -> Cost:
    """Measure the loop with the engine started as it is."""
    cost = Cost("plain relaunch, unpatched", loads=given.rounds + 1)
    command = [str(engine), "-m", str(model), *options]
    alternate(cost, command, os.environ, given.rounds, given.sentences)
    return cost


def shown(costs: Sequence[Cost], rounds: int) -> str:
    """Return both loops side by side, and below them every pause that the ledger has."""
    rows = (
        (f"wall time of {rounds} alternations", *(f"{cost.wall_s:.1f} s" for cost in costs)),
        ("from start to healthy, median", *(f"{median(cost.start_s):.2f} s" for cost in costs)),
        ("a turn's answer, median", *(f"{median(cost.answer_s):.2f} s" for cost in costs)),
        ("tokens prefilled again", *(str(cost.again) for cost in costs)),
        ("weight loads", *(str(cost.loads) for cost in costs)),
        ("pauses in the ledger", *(_pauses(cost.pauses_ms) for cost in costs)),
    )
    columns = ("", *(cost.name for cost in costs))
    each = [
        f"{cost.name}, every pause in ms: {' '.join(f'{ms:.1f}' for ms in cost.pauses_ms)}"
        for cost in costs
        if cost.pauses_ms
    ]
    return "\n".join([Shown("One model, two command lines", columns, rows).markdown(), "", *each])


def _pauses(pauses_ms: Sequence[float]) -> str:
    if not pauses_ms:
        return "none"
    return f"{len(pauses_ms)}, median {median(pauses_ms):.1f} ms, max {max(pauses_ms):.1f} ms"


def main() -> int:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, help="a patched llama-server; default: built")
    parser.add_argument("--model", type=Path, help="a GGUF file; default: SmolLM2 135M")
    parser.add_argument("--unpatched", type=Path, help="what to relaunch plainly; default: built")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sentences", type=int, default=120, help="to begin with")
    parser.add_argument("--threads", type=int, default=1, help="of the engine; default: 1")
    given = parser.parse_args()
    options = [*PLAIN, "-t", str(given.threads)]
    with TerminalProgress() as progress:
        model = given.model or models.ensure_default_model(progress)
        engine = given.engine or build.ensure_engine(progress=progress).path
        unpatched = given.unpatched
        unpatched = unpatched or build.ensure_engine(unpatched=True, progress=progress).path
    kept = supervised(engine, model, options, given)
    relaunched = plain(unpatched, model, options, given)
    sys.stdout.write(f"{shown([kept, relaunched], given.rounds)}\n{look()}\n")
    counts = (kept.loads, kept.again, len(kept.pauses_ms))
    return 0 if counts == (1, 0, given.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
