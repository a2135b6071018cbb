"""Measures one cell: ours, and what it is held against, in turn."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil
from llamactl_validate import lowly
from llamactl_validate.expecting import expect
from llamactl_validate.workplace import Workplace

from llamactl_bench import grid
from llamactl_bench.asking import (
    Copy,
    Neighbour,
    complete,
    converse,
    engine,
    gaps_ms,
    milliseconds,
    prompt_of,
    stop,
    vocabulary,
    written_ms,
)
from llamactl_bench.cell import Cell, Mark, Outcome, Side, Table, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llamactl_validate.asked import Json
    from llamactl_validate.engine import Engine

WARM_TOKENS, WARM_ANSWER = 64, 8
HELD, NEIGHBOUR = 1, 0
"""Slots."""
PAGE = "bench"


@dataclass(frozen=True)
class Subject:
    """What is measured, and what it is held against."""

    program: Path
    baseline: Path
    model: Path


@dataclass
class _Found:
    """What a cell has found so far."""

    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    facts: dict[str, float] = field(default_factory=dict)
    timelines: list[Timeline] = field(default_factory=list)

    def add(self, **values: float) -> None:
        """Note values of a round."""
        for name, value in values.items():
            self.samples[name].append(value)


def measure(cell: Cell, subject: Subject, told: Callable[[str], None]) -> Outcome:
    """Return what was found; `told` is called with every step.

    Raises `Skipped` for what the model cannot do, `Failed` where something was lost, and what
    httpx raises where an engine does not answer.
    """
    found = _Found()
    _MEASURES[cell.table](cell, subject, found, told)
    return Outcome(
        cell=cell,
        samples={name: tuple(values) for name, values in found.samples.items()},
        facts=found.facts,
        timelines=tuple(found.timelines),
    )


def _reconfigure(cell: Cell, subject: Subject, found: _Found, told: Callable[[str], None]) -> None:
    """Change back and forth between two geometries, the same states held."""
    with engine(subject.program, subject.model, *grid.away(cell)) as live:
        prompts = _filled(live, cell, told)
        process = psutil.Process(live.process.pid)
        before = process.memory_info().rss
        first = _changed(live, (cell.n_ctx, cell.n_seq))
        found.facts["resident_ratio"] = process.memory_info().rss / before
        found.facts["bytes_held"] = first["bytes_held"]
        copy = Copy(first["bytes_held"])
        copy.ms()
        for number in range(cell.rounds):
            told(f"round {number + 1} of {cell.rounds}")
            _there_and_back(live, cell, found)
            found.add(memcpy_ms=copy.ms())
        _nothing_lost(live, prompts)


def _relaunch(cell: Cell, subject: Subject, found: _Found, told: Callable[[str], None]) -> None:
    """Beside a change of ours: an end and a start with the slots in files, and one without."""
    files = Workplace()
    try:
        with engine(subject.program, subject.model, *grid.away(cell)) as ours:
            prompts = _filled(ours, cell, told)
            _changed(ours, (cell.n_ctx, cell.n_seq))
            with closing(_Relaunched(cell, subject, files, prompts)) as relaunched:
                relaunched.start()
                for number in range(cell.rounds):
                    told(f"round {number + 1} of {cell.rounds}")
                    turns: list[Callable[[_Found], None]] = [
                        lambda found: _there_and_back(ours, cell, found),
                        relaunched.round,
                    ]
                    for turn in turns if number % 2 else reversed(turns):
                        turn(found)
            _nothing_lost(ours, prompts)
    finally:
        files.close()


class _Relaunched:
    """An engine that is ended and started again, and holds the same conversations each time."""

    def __init__(
        self, cell: Cell, subject: Subject, files: Workplace, prompts: list[list[int]]
    ) -> None:
        self._cell, self._subject, self._prompts = cell, subject, prompts
        self._options = ("--slot-save-path", str(files.slot_files))
        self._n_seq = cell.n_seq
        self._open = ExitStack()

    def start(self) -> None:
        """Have it hold the conversations for the first time."""
        self._live = self._started()
        converse(self._live, self._prompts)

    def round(self, found: _Found) -> None:
        """Relaunch with the slots in files, then with another number of slots, which cannot."""
        carried = milliseconds(self._carry)
        read = milliseconds(self._read)
        starter = milliseconds(self._start_nothing)
        # Our engines are started by a small program, which a server's owner does without.
        found.add(carry_s=(carried - starter) / 1e3, read_again_s=(read - starter) / 1e3)

    def _carry(self) -> None:
        for slot in range(len(self._prompts)):
            saved = self._live.file(slot, "save", f"{slot}.bin")
            expect("the status of a save", saved.status, 200)
        self._relaunch()
        for slot in range(len(self._prompts)):
            restored = self._live.file(slot, "restore", f"{slot}.bin")
            expect("the status of a restore", restored.status, 200)

    def _read(self) -> None:
        self._n_seq = self._cell.n_seq + (self._n_seq == self._cell.n_seq)
        self._relaunch()
        converse(self._live, self._prompts)

    def _relaunch(self) -> None:
        stop(self._live)
        self.close()
        self._live = self._started()

    def _started(self) -> Engine:
        geometry = (self._cell.n_ctx, self._n_seq)
        subject = self._subject
        return self._open.enter_context(
            engine(subject.baseline, subject.model, *geometry, *self._options)
        )

    @staticmethod
    def _start_nothing() -> None:
        words = [sys.executable, "-P", "-m", lowly.__name__, str(os.getpid()), lowly.EQUAL]
        subprocess.run([*words, "/bin/sh", "-c", ""], check=True)

    def close(self) -> None:
        """End it."""
        self._open.close()


def _pages(cell: Cell, subject: Subject, found: _Found, told: Callable[[str], None]) -> None:
    """A conversation goes out of its slot and back, beside a neighbour that is written to."""
    geometry = (cell.n_ctx, cell.n_seq)
    with (
        engine(subject.program, subject.model, *geometry) as ours,
        engine(subject.baseline, subject.model, *geometry) as theirs,
    ):
        ours.room_for(cell.n_tokens)
        n_vocab = vocabulary(ours)
        prompt = prompt_of(cell.n_tokens, 1, n_vocab)
        short = prompt_of(16, 7, n_vocab)
        for live in (ours, theirs):
            told(f"reads {cell.n_tokens} tokens")
            complete(live, HELD, prompt, 1)
        n_bytes = _paged_out(ours)["n_bytes"]
        _paged_in(ours)
        found.facts["bytes_held"] = n_bytes
        copy = Copy(n_bytes)
        copy.ms()
        for number in range(cell.rounds):
            told(f"round {number + 1} of {cell.rounds}")
            turns = [(Side.OURS, ours), (Side.BASELINE, theirs)]
            if number % 2 == 0:
                turns.reverse()
            lines = [_beside(live, short, side, cell, found) for side, live in turns]
            found.add(memcpy_ms=copy.ms())
            _alone(ours, found)
        found.timelines += sorted(lines, key=lambda line: line.side, reverse=True)


def _beside(live: Engine, short: list[int], side: Side, cell: Cell, found: _Found) -> Timeline:
    """One way out and back beside a neighbour."""
    with Neighbour(live, NEIGHBOUR, short) as neighbour:
        watched = _Watched(neighbour, found)
        if side is Side.OURS:
            watched.operate("page_out", lambda: _paged_out(live)["ms"])
            watched.operate("spill", lambda: live.spill(PAGE, filename=PAGE).receipt["ms"])
            watched.operate("page_in", lambda: _paged_in(live)["ms"])
            watched.operate("grow", lambda: _changed(live, grid.grown(cell))["pause_ms"])
            back = (cell.n_ctx, cell.n_seq)
            watched.operate("shrink", lambda: _changed(live, back)["pause_ms"])
            found.add(gap_ms=watched.median_gap(), quiet_ms=watched.worst_quiet())
        else:
            watched.operate("save", lambda: _filed(live, "save"))
            watched.operate("restore", lambda: _filed(live, "restore"))
    return watched.timeline(side)


class _Watched:
    """Does things beside a neighbour, and notes what they take and what it feels of them."""

    def __init__(self, neighbour: Neighbour, found: _Found) -> None:
        self._neighbour, self._found = neighbour, found
        self._began = neighbour.came[0]
        self._marks: list[Mark] = []
        self._quiet: list[float] = []

    def operate(self, name: str, action: Callable[[], float]) -> None:
        """Do one thing; a gap counts until the next token after its answer."""
        quiet = time.perf_counter()
        self._neighbour.rest()
        start = time.perf_counter()
        engine_ms = action()
        end = time.perf_counter()
        self._neighbour.wrote_after(end)
        came = self._neighbour.came
        self._quiet += gaps_ms(came, quiet, start)[:-1]  # the last one reaches into what follows
        worst = max(gaps_ms(came, start, end))
        self._found.add(**{f"{name}_ms": engine_ms, f"beside_{name}_ms": worst})
        self._marks.append(Mark(name=name, start_ms=self._since(start), end_ms=self._since(end)))

    def median_gap(self) -> float:
        """Return the median gap while nothing was done, in ms."""
        return statistics.median(self._quiet)

    def worst_quiet(self) -> float:
        """Return the longest of them."""
        return max(self._quiet)

    def timeline(self, side: Side) -> Timeline:
        """Return when the tokens came."""
        came = tuple(round(self._since(each), 3) for each in self._neighbour.came)
        return Timeline(side=side, came_ms=came, marks=tuple(self._marks))

    def _since(self, moment: float) -> float:
        return (moment - self._began) * 1e3


def _alone(live: Engine, found: _Found) -> None:
    """Write the page while nobody decodes, and as many bytes without an engine."""
    n_bytes = _paged_out(live)["n_bytes"]
    spilled = live.spill(PAGE, filename=PAGE).receipt["ms"]
    found.add(spill_alone_ms=spilled, write_ms=written_ms(live.slot_files / "bytes", n_bytes))
    _paged_in(live)


def _speed(cell: Cell, subject: Subject, found: _Found, told: Callable[[str], None]) -> None:
    """Read a prompt and write an answer, ours and the other engine in turn."""
    geometry = (cell.n_ctx, cell.n_seq)
    with (
        engine(subject.program, subject.model, *geometry) as ours,
        engine(subject.baseline, subject.model, *geometry) as theirs,
    ):
        ours.room_for(cell.n_tokens + grid.SPEED_ANSWER)
        n_vocab = vocabulary(ours)
        for live in (ours, theirs):
            complete(live, 0, prompt_of(WARM_TOKENS, 9, n_vocab), WARM_ANSWER)
        for number in range(cell.rounds):
            told(f"round {number + 1} of {cell.rounds}")
            fresh = prompt_of(cell.n_tokens, 11 + number, n_vocab)
            turns = [(Side.OURS, ours), (Side.BASELINE, theirs)]
            for side, live in turns if number % 2 else reversed(turns):
                timings = complete(live, 0, fresh, grid.SPEED_ANSWER)
                found.add(
                    **{
                        f"{side}_prefill_per_s": timings["prompt_per_second"],
                        f"{side}_decode_per_s": timings["predicted_per_second"],
                    }
                )


_MEASURES = {
    Table.RECONFIGURE: _reconfigure,
    Table.RELAUNCH: _relaunch,
    Table.PAGES: _pages,
    Table.SPEED: _speed,
}


def _filled(live: Engine, cell: Cell, told: Callable[[str], None]) -> list[list[int]]:
    """Have every slot of the cell hold its conversation; return them."""
    live.room_for(cell.per_slot)
    told(f"reads {cell.n_tokens} tokens")
    n_vocab = vocabulary(live)
    prompts = [prompt_of(cell.per_slot, seed, n_vocab) for seed in range(1, cell.n_seq + 1)]
    converse(live, prompts)
    return prompts


def _changed(live: Engine, geometry: tuple[int, int]) -> Json:
    n_ctx, n_seq = geometry
    return live.applied(n_ctx=n_ctx, n_seq=n_seq)


def _there_and_back(live: Engine, cell: Cell, found: _Found) -> None:
    _changed(live, grid.away(cell))
    began = time.perf_counter()
    receipt = _changed(live, (cell.n_ctx, cell.n_seq))
    found.add(
        pause_ms=receipt["pause_ms"],
        build_ms=receipt["outside_pause_ms"]["build"],
        change_s=time.perf_counter() - began,
    )


def _nothing_lost(live: Engine, prompts: list[list[int]]) -> None:
    """Go on with each conversation by one token: no other one is read."""
    for slot, prompt in enumerate(prompts):
        timings = complete(live, slot, [*prompt, prompt[0]], 1)
        expect("tokens read after the changes", timings["prompt_n"], 1)


def _paged_out(live: Engine) -> Json:
    return live.page(HELD, "page_out", PAGE).receipt


def _paged_in(live: Engine) -> Json:
    return live.page(HELD, "page_in", PAGE).receipt


def _filed(live: Engine, action: str) -> float:
    """Return what it took on the engine's thread: all of it, where nothing else is told."""
    timings = live.file(HELD, action, PAGE).receipt["timings"]
    return float(timings.get("engine_ms", timings[f"{action}_ms"]))
