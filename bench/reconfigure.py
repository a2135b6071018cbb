"""Measures what a live reconfigure costs beside a relaunch, in one run and as one table.

`make bench` builds the patched and the pristine engine and runs this on the default model with two
conversations of about 5,000 tokens. Every figure comes from this run; ratios are what carries over
to another machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_builder import build, models
from llamactl_builder.progress import TerminalProgress
from measured import Engine, memcpy_ms, prompt_of, running, say, seconds
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL, LARGE = {"n_ctx": 24576, "n_seq": 3}, {"n_ctx": 131072, "n_seq": 4}
WARM = 64  # tokens of a prompt that only warms an engine up


@dataclass
class Pauses:
    """What the patched engine did."""

    small_ms: float
    large_ms: float
    n_bytes: int
    n_tokens: int
    build_ms: float
    resident_before: int
    resident_after: int
    reused: int
    weight_loads: int


@dataclass
class Relaunch:
    """What the pristine engine needs instead. The state of another slot count does not load."""

    same_slots_s: float
    other_slots_s: float


def measure_pauses(engine: Engine, prompts: list[list[int]], repeats: int) -> Pauses:
    """Reconfigure back and forth between the two geometries, the same states held."""
    engine.converse(prompts)
    before = engine.resident_bytes()
    first = engine.post("/reconfigure", **LARGE)
    after = engine.resident_bytes()
    small, large = [], [first]
    for _ in range(repeats):
        small.append(engine.post("/reconfigure", **SMALL))
        large.append(engine.post("/reconfigure", **LARGE))
    timings = engine.complete(0, [*prompts[0], 100], 1)
    return Pauses(
        small_ms=statistics.median(receipt["pause_ms"] for receipt in small),
        large_ms=statistics.median(receipt["pause_ms"] for receipt in large),
        n_bytes=first["bytes_held"],
        n_tokens=first["tokens_held"],
        build_ms=statistics.median(r["outside_pause_ms"]["build"] for r in large),
        resident_before=before,
        resident_after=after,
        reused=timings["cache_n"],
        weight_loads=large[-1]["n_weight_loads"],
    )


def measure_relaunch(make: Callable[[int], Engine], prompts: list[list[int]]) -> Relaunch:
    """From an engine that holds the conversations until another one holds them."""
    slots = range(len(prompts))
    with running(make(2)) as engine:
        engine.converse(prompts)
        save_s = seconds(
            lambda: [
                engine.post(f"/slots/{slot}?action=save", filename=f"bench-{slot}.bin")
                for slot in slots
            ]
        )
        stop_s = seconds(engine.stop)
    start = time.perf_counter()
    with running(make(2)) as engine:
        for slot in slots:
            engine.post(f"/slots/{slot}?action=restore", filename=f"bench-{slot}.bin")
        restored_s = time.perf_counter() - start
    start = time.perf_counter()
    with running(make(3)) as engine:
        engine.converse(prompts)
        prefilled_s = time.perf_counter() - start
    return Relaunch(same_slots_s=save_s + stop_s + restored_s, other_slots_s=stop_s + prefilled_s)


def speed_ratios(
    ours: Engine, theirs: Engine, prompt: list[int], repeats: int
) -> tuple[float, float]:
    """Prefill and decode speed of ours by theirs: medians over runs in turn."""
    prefill, decode = [], []
    for run in range(repeats):
        fresh = [100 + run, *prompt]  # another first token, so that nothing is reused
        timings = {
            engine: engine.complete(0, fresh, 64)
            for engine in ((ours, theirs) if run % 2 else (theirs, ours))
        }
        prefill.append(timings[ours]["prompt_per_second"] / timings[theirs]["prompt_per_second"])
        decode.append(
            timings[ours]["predicted_per_second"] / timings[theirs]["predicted_per_second"]
        )
    return statistics.median(prefill), statistics.median(decode)


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=5000, help="of each of two conversations")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    with TerminalProgress() as progress:
        patched = build.ensure_engine(progress=progress).path
        pristine = build.ensure_engine(unpatched=True, progress=progress).path
        model = models.ensure_default_model(progress)
    prompts = [prompt_of(options.tokens, seed) for seed in (1, 2)]

    with tempfile.TemporaryDirectory() as slots_dir:

        def make(binary: Path, n_seq: int) -> Engine:
            return Engine(binary, model, Path(slots_dir), n_seq)

        say("patched: two conversations, then reconfigure back and forth")
        with running(make(patched, 2)) as engine:
            pauses = measure_pauses(engine, prompts, options.repeats)
        copy_ms = memcpy_ms(pauses.n_bytes, options.repeats)
        say("pristine: relaunch, with saved slots and with another slot count")
        relaunch = measure_relaunch(lambda n_seq: make(pristine, n_seq), prompts)
        say("both: prefill and decode speed, interleaved")
        with running(make(patched, 2)) as ours, running(make(pristine, 2)) as theirs:
            for engine in (ours, theirs):
                engine.complete(0, prompt_of(WARM, 9), 8)
            prefill, decode = speed_ratios(ours, theirs, prompt_of(512, 3), 2 * options.repeats)

    resident = pauses.resident_after / pauses.resident_before
    rows = [
        ("pause at 131072 x 4", f"{pauses.large_ms:.1f} ms", ""),
        ("pause at 24576 x 3", f"{pauses.small_ms:.1f} ms", ""),
        ("build of the new contexts, beside decoding", f"{pauses.build_ms:.1f} ms", ""),
        ("memcpy of the held bytes", f"{copy_ms:.1f} ms", ""),
        ("relaunch to another slot count (prefill again)", f"{relaunch.other_slots_s:.2f} s", ""),
        ("relaunch to the same slot count (save, restore)", f"{relaunch.same_slots_s:.2f} s", ""),
        (
            "relaunch to another slot count / pause",
            f"{relaunch.other_slots_s * 1e3 / pauses.large_ms:.0f}",
            ">= 100",
        ),
        (
            "relaunch to the same slot count / pause",
            f"{relaunch.same_slots_s * 1e3 / pauses.large_ms:.1f}",
            ">= 8",
        ),
        (
            "pause at 131072 x 4 / at 24576 x 3",
            f"{pauses.large_ms / pauses.small_ms:.2f}",
            "<= 1.3",
        ),
        ("pause / (2 x memcpy)", f"{pauses.large_ms / (2 * copy_ms):.2f}", "<= 1.5, at most 2.0"),
        ("resident memory after growing / before", f"{resident:.3f}", "<= 1.05"),
        ("prefill, patched / pristine", f"{prefill:.3f}", "0.98 to 1.02"),
        ("decode, patched / pristine", f"{decode:.3f}", "0.98 to 1.02"),
        ("weight loads of the patched engine", str(pauses.weight_loads), "1"),
    ]
    table = Table("figure", "measured", "target", title="reconfigure against relaunch")
    for row in rows:
        table.add_row(*row)
    console = Console(width=100)
    console.print(table)
    console.print(
        f"{pauses.n_tokens} tokens held in 2 slots, {pauses.n_bytes / 1e6:.0f} MB; the next "
        f"request reused {pauses.reused} tokens. {platform.machine()}, {os.cpu_count()} cores, "
        f"Linux {platform.release()}; medians of {options.repeats}."
    )


if __name__ == "__main__":
    main()
