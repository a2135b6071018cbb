"""Measures what a conversation's way out of its slot and back costs, beside slot files upstream.

`make bench-pages` runs the patched and the pristine engine in turn on the default model and on a
hybrid one. A conversation of about 5,000 tokens sits in one slot, a neighbour streams in another:
the patched engine takes the conversation out to a page, writes the page to files and puts it back;
the pristine one saves and restores the slot. Every figure comes from this run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tiny_models
from llamactl_builder import build, models
from llamactl_builder.progress import TerminalProgress
from measured import Engine, memcpy_ms, prompt_of, running, say, seconds
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

HELD, NEIGHBOUR = 1, 0  # slots
QUIET_S = 0.4
"""How long the neighbour is watched undisturbed before an operation."""
WIDE = ("--override-kv", "qwen35.context_length=int:65536")


class Neighbour:
    """A generation in a slot of its own, and when each of its tokens came."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        body = {
            "prompt": prompt,
            "n_predict": -1,
            "stream": True,
            "id_slot": NEIGHBOUR,
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 0,
        }
        content = json.dumps(body).encode()
        head = (
            f"POST /completion HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._socket = socket.create_connection(("127.0.0.1", engine.port))
        self._socket.sendall(head.encode() + content)
        self.came: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        while len(self.came) < 8:
            time.sleep(0.01)

    def _watch(self) -> None:
        # Bytes are not looked at: who measures takes as little as can be from who decodes.
        while not self._ended.is_set() and self._socket.recv(1 << 16):
            self.came.append(time.perf_counter())

    def end(self) -> None:
        """Hang up."""
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def gaps_ms(self, start: float, end: float) -> list[float]:
        """Return the gaps between tokens that any part of this time lies in."""
        pairs = zip(self.came, self.came[1:], strict=False)
        return [(b - a) * 1e3 for a, b in pairs if b > start and a < end]


@dataclass
class Figures:
    """What was measured of one engine, in milliseconds; a list has one value for each round."""

    times: dict[str, list[float]] = field(default_factory=dict)
    worst: dict[str, list[float]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    n_bytes: int = 0

    def add(self, name: str, engine_ms: float, gaps: list[float]) -> None:
        """Note one operation."""
        self.times.setdefault(name, []).append(engine_ms)
        self.worst.setdefault(name, []).append(max(gaps))

    def time(self, name: str) -> float:
        """Median time on the engine's thread."""
        return statistics.median(self.times[name])

    def worst_gap(self, *names: str) -> float:
        """Median over the rounds of the worst gap beside any of these operations."""
        rounds = zip(*(self.worst[name] for name in names), strict=True)
        return float(statistics.median(max(each) for each in rounds))


def operate(
    neighbour: Neighbour, figures: Figures, name: str, action: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Do one thing beside the neighbour; a gap counts until the next token after its answer."""
    quiet = time.perf_counter()
    time.sleep(QUIET_S)
    start = time.perf_counter()
    answer = action()
    end = time.perf_counter()
    while neighbour.came[-1] < end:
        time.sleep(0.001)
    figures.quiet += neighbour.gaps_ms(quiet, start)
    timings = answer.get("timings", {})
    ms = answer.get("ms", timings.get("save_ms", timings.get("restore_ms")))
    figures.add(name, ms, neighbour.gaps_ms(start, end))
    return answer


def round_of(engine: Engine, figures: Figures, prompt: list[int], *, patched: bool) -> None:
    """One way out and back beside a streaming neighbour."""

    def act(action: str, **body: object) -> dict[str, Any]:
        return engine.post(f"/slots/{HELD}?action={action}", **body)

    engine.complete(HELD, prompt, 1)
    neighbour = Neighbour(engine, prompt_of(16, 7, engine.n_vocab))
    if patched:
        out = operate(neighbour, figures, "page_out", lambda: act("page_out&page=bench"))
        figures.n_bytes = out["n_bytes"]
        operate(neighbour, figures, "spill", lambda: act("spill&page=bench", filename="ours"))
        operate(neighbour, figures, "page_in", lambda: act("page_in&page=bench"))
    else:
        operate(neighbour, figures, "save", lambda: act("save", filename="theirs"))
        operate(neighbour, figures, "restore", lambda: act("restore", filename="theirs"))
    figures.gaps += neighbour.gaps_ms(0, time.perf_counter())
    neighbour.end()


def spill_and_dd_ms(
    engine: Engine, slots_dir: Path, prompt: list[int], repeats: int
) -> tuple[float, float]:
    """Median times of a spill while nobody decodes, and of dd writing the same bytes."""
    engine.complete(HELD, prompt, 1)
    engine.post(f"/slots/{HELD}?action=page_out&page=bench")
    spills, copies = [], []
    for _ in range(repeats):
        answer = engine.post(f"/slots/{HELD}?action=spill&page=bench", filename="ours")
        spills.append(answer["ms"])
        dd = ["dd", f"if={slots_dir}/ours", f"of={slots_dir}/dd", "bs=1M", "conv=fsync"]
        copies.append(1e3 * seconds(partial(subprocess.run, dd, check=True, capture_output=True)))
    return statistics.median(spills), statistics.median(copies)


def rows_of(
    ours: Figures, theirs: Figures, copy_ms: float, alone: tuple[float, float]
) -> list[tuple[str, str, str]]:
    """The lines of the table: figure, measured, target."""
    median = statistics.median(ours.gaps)
    pages, save = ours.worst_gap("page_out", "page_in"), theirs.worst_gap("save")

    def line(name: str, value: float, target: str = "", unit: str = "") -> tuple[str, str, str]:
        return name, f"{value:.2f}{unit}", target

    return [
        line("memcpy of the page's bytes", copy_ms, unit=" ms"),
        line("page_out, on the engine's thread", ours.time("page_out"), unit=" ms"),
        line("page_in, on the engine's thread", ours.time("page_in"), unit=" ms"),
        line("spill, beside decoding", ours.time("spill"), unit=" ms"),
        line("spill, nobody decoding", alone[0], unit=" ms"),
        line("dd conv=fsync of the same bytes", alone[1], unit=" ms"),
        line("save, pristine engine, on its thread", theirs.time("save"), unit=" ms"),
        line("restore, pristine engine, on its thread", theirs.time("restore"), unit=" ms"),
        line("neighbour's median gap", median, unit=" ms"),
        line("neighbour's worst gap in quiet time", worst_quiet(ours), unit=" ms"),
        line("neighbour's worst gap beside spill", ours.worst_gap("spill"), unit=" ms"),
        line("neighbour's worst gap beside page_out and page_in", pages, unit=" ms"),
        line("neighbour's worst gap beside save, pristine", save, unit=" ms"),
        line("page_out / memcpy", ours.time("page_out") / copy_ms, "<= 1.3"),
        line("page_in / memcpy", ours.time("page_in") / copy_ms, "<= 1.5"),
        line("save, pristine / page_out", theirs.time("save") / ours.time("page_out"), ">= 4"),
        line("worst gap beside spill / median gap", ours.worst_gap("spill") / median, "<= 1.5"),
        line("worst gap beside page_out and page_in / beside save", pages / save, "<= 0.35"),
        line("spill / dd, throughput", alone[1] / alone[0], ">= 0.7"),
    ]


def worst_quiet(figures: Figures) -> float:
    """The gap that 99 of 100 undisturbed tokens stay below."""
    return statistics.quantiles(figures.quiet, n=100)[98]


def main() -> None:
    """Run everything and print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=5000, help="of the conversation that is moved"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write every single measurement to this file")
    options = parser.parse_args()

    with TerminalProgress() as progress:
        patched = build.ensure_engine(progress=progress).path
        pristine = build.ensure_engine(unpatched=True, progress=progress).path
        tiny = tiny_models.ensure(lambda: build.ensure_test_tools(progress=progress).directory)
        kinds: list[tuple[str, Path, tuple[str, ...]]] = [
            ("SmolLM2-135M", models.ensure_default_model(progress), ()),
            ("a hybrid of 24 layers", tiny.model("qwen35-deep"), WIDE),
        ]

    console = Console(width=100)
    document: dict[str, Any] = {}
    for name, model, more in kinds:
        ours, theirs = Figures(), Figures()
        with (
            tempfile.TemporaryDirectory() as slots_dir,
            running(Engine(patched, model, Path(slots_dir), 2, *more)) as a,
            running(Engine(pristine, model, Path(slots_dir), 2, *more)) as b,
        ):
            prompt = prompt_of(options.tokens, 1, a.n_vocab)
            for n in range(options.repeats):
                say(f"{name}: round {n + 1} of {options.repeats}")
                for engine, figures in (
                    ((a, ours), (b, theirs)) if n % 2 else ((b, theirs), (a, ours))
                ):
                    round_of(engine, figures, prompt, patched=engine is a)
            alone = spill_and_dd_ms(a, Path(slots_dir), prompt, options.repeats)
            copy_ms = memcpy_ms(ours.n_bytes, options.repeats)
        table = Table("figure", "measured", "target", title=f"pages against slot files: {name}")
        for row in rows_of(ours, theirs, copy_ms, alone):
            table.add_row(*row)
        console.print(table)
        console.print(
            f"{options.tokens} tokens, {ours.n_bytes / 1e6:.1f} MB. {platform.machine()}, "
            f"{os.cpu_count()} cores, Linux {platform.release()}; "
            f"medians of {options.repeats} rounds."
        )
        document[name] = {"ours": vars(ours), "theirs": vars(theirs), "memcpy_ms": copy_ms}
    if options.json:
        options.json.write_text(json.dumps(document))


if __name__ == "__main__":
    main()
