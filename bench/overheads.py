"""What supervision costs: a command's start, and a daemon that has nothing to do.

`make bench-overheads` prints it against the targets and fails where one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
from llamactl_bench.machine import look

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[1]
FAKE_ENGINE = ROOT / "tests" / "fakes" / "fake_engine.py"
STATUS_MS_MAX = 250.0
IDLE_PERCENT_MAX = 0.5
RESIDENT_MB_MAX = 80.0
ROUNDS = 15
IDLE_S = 20.0
SETTLE_S = 3.0
"""What a start leaves to be done is done by then."""


def run(*words: str) -> dict[str, Any]:
    """Run `llamactl words --json` and return its result."""
    command = [sys.executable, "-m", "llamactl_cli", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def spent_ms(command: Sequence[str]) -> tuple[float, float]:
    """Return how long the command takes and how much CPU, in ms."""
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    taken_s = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return taken_s * 1000, (used.ru_utime + used.ru_stime) * 1000


def status_ms(rounds: int) -> tuple[float, float]:
    """Return the median of what `llamactl status` takes more than `python -c pass`: time, CPU.

    On a machine with other work only the second is ours.
    """
    bare = (sys.executable, "-c", "pass")
    status = (sys.executable, "-m", "llamactl_cli", "status")
    pairs = [(spent_ms(bare), spent_ms(status)) for _ in range(rounds + 1)][1:]
    gaps = [(taken[0] - nothing[0], taken[1] - nothing[1]) for nothing, taken in pairs]
    return median(gap[0] for gap in gaps), median(gap[1] for gap in gaps)


def idle(pid: int, for_s: float) -> tuple[float, float]:
    """Return the process's CPU over `for_s` seconds in % of a core, and its resident MB."""
    process = psutil.Process(pid)
    time.sleep(SETTLE_S)
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(for_s)
    used_s = sum(process.cpu_times()[:2]) - before
    return used_s / (time.monotonic() - began) * 100, process.memory_info().rss / 1e6


@contextlib.contextmanager
def engine(*words: str) -> Iterator[int]:
    """Bring an engine up in directories of its own; yield its daemon's pid."""
    home = tempfile.mkdtemp(prefix="llamactl-")
    os.environ |= {"LLAMACTL_STATE_DIR": f"{home}/s", "LLAMACTL_RUNTIME_DIR": f"{home}/r"}
    try:
        yield run("up", "--json", *words)["daemon_pid"]
    finally:
        run("down", "--json")
        shutil.rmtree(home, ignore_errors=True)


def measure(name: str, words: Sequence[str], rounds: int, idle_s: float) -> bool:
    """Print the figures with one engine; return whether each is within its target."""
    with engine(*words) as daemon_pid:
        cpu, resident = idle(daemon_pid, idle_s)
        gap, gap_cpu = status_ms(rounds)
    rows = (
        ("llamactl status - python -c pass", gap, "ms", STATUS_MS_MAX),
        ("idle daemon, CPU of one core", cpu, "%", IDLE_PERCENT_MAX),
        ("idle daemon, resident", resident, "MB", RESIDENT_MB_MAX),
    )
    for title, value, unit, most in rows:
        print(f"| {title}, {name} | {value:.3g} {unit} | <= {most:g} {unit} |")  # noqa: T201
    print(f"{name}: medians of {rounds} pairs, {gap_cpu:.0f} ms of it CPU", file=sys.stderr)  # noqa: T201
    return all(value <= most for _, value, _, most in rows)


def main() -> int:
    """Measure with the fake engine, and with a real one where it is given or built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, help="a llama-server instead of a built one")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    asked = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed command has its bytecode
    port = ("--port", str(asked.port))
    print("| | measured | target |\n|---|---|---|")  # noqa: T201
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model.gguf"
        model.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(16))
        fake = ("--engine", str(FAKE_ENGINE), "--model", str(model), *port)
        good = measure("fake engine", fake, asked.rounds, asked.idle_s)
    real = ("--engine", str(asked.engine), *port) if asked.engine else port
    good &= measure("SmolLM2", real, asked.rounds, asked.idle_s)
    print(f"\n{look()}")  # noqa: T201
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
