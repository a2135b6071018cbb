"""Many changes after each other: nothing changes, and nothing grows."""

from __future__ import annotations

import psutil

from llamactl_validate.conversations import TEXTS, Later, go_on, hold
from llamactl_validate.expecting import expect, expect_that, until
from llamactl_validate.scenario import Trial, scenario

FOUR = ("--parallel", "4", "--ctx-size", "8192")
SETTLED = 10
"""Cycles after which an allocator has taken what it keeps."""
GROWTH_MAX = 1.01
MIB = 2**20


def resident(process: psutil.Process) -> int:
    """Return resident bytes, counted page by page: the running count is off by megabytes."""
    return sum(mapping.rss for mapping in process.memory_maps(grouped=True))


@scenario(
    "conversations are parked, placed and moved again and again; memory, files and threads stay",
    n_steps=(160, 200),
)
def parked_and_moved(trial: Trial) -> None:
    """Half of the states are parked and placed in each cycle, the other half is moved."""
    n_cycles = trial.number(12, 100)
    with trial.engine(*FOUR) as live:

        def conversations() -> list[list[int]]:
            live.erase()
            return [hold(live, slot, text, n_predict=8) for slot, text in enumerate(TEXTS)]

        def gone_on() -> list[Later]:
            return [go_on(live, slot, each) for slot, each in enumerate(said)]

        def undisturbed() -> list[Later]:
            conversations()
            return gone_on()

        said = conversations()
        control = trial.control(undisturbed)
        expect("what the conversations hold", conversations(), said)

        process = psutil.Process(live.process.pid)
        seen: list[tuple[int, int, int]] = []
        for cycle in range(n_cycles):
            trial.now(f"cycle {cycle + 1} of {n_cycles}")
            small = live.applied(n_ctx=1024 + 512 * (cycle % 3), n_seq=2)
            expect("who is parked", [each["slot"] for each in small["parked"]], [2, 3])
            large = live.applied(n_ctx=8192 + 4096 * (cycle % 5), n_seq=4 + cycle % 2)
            expect("who is still parked", large["parked"], [])
            expect("how many slots have a state", len(large["slots"]), 4)
            seen.append((resident(process), process.num_fds(), process.num_threads()))

        trial.now("what is left after the cycles")
        settled = max(rss for rss, _, _ in seen[:SETTLED])
        highest = max(rss for rss, _, _ in seen[SETTLED:])
        trial.measure("cycles", n_cycles)
        trial.measure(f"resident after {SETTLED}", settled / MIB, "MiB")
        trial.measure("at most later", highest / MIB, "MiB")
        within = f"the memory stays within {GROWTH_MAX:.0%} of what it was"
        expect_that(within, highest <= settled * GROWTH_MAX, f"{settled} B, then {highest} B")
        threads = {threads for _, _, threads in seen[SETTLED:]}
        expect_that("as many threads after every cycle", len(threads) == 1, threads)
        files = min(files for _, files, _ in seen[:SETTLED])
        until(
            f"open files are {files} again, once the last connection is closed",
            lambda: process.num_fds() == files,
            within_s=live.patience_s,
        )
        expect("what goes on with the conversations", gone_on(), control)
