"""The parts of `llamactl bench` that need no engine: statistics, grid, budget, record, report."""

from __future__ import annotations

import json
import resource
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from llamactl_bench import grid, plots, record, runner
from llamactl_bench.asking import gaps_ms, prompt_of, written_ms
from llamactl_bench.cell import Cell, Machine, Mark, Outcome, Side, Table, Timeline
from llamactl_bench.machine import Watch, doubts
from llamactl_bench.measure import Subject
from llamactl_bench.record import Record
from llamactl_bench.report import Report
from llamactl_bench.spread import number, ratio, spread
from llamactl_bench.tables import tables
from llamactl_supervisor.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

QUIET = Machine(
    cpu="A processor",
    architecture="x86_64",
    cores=2,
    memory_bytes=8 * 2**30,
    kernel="Linux 6.0",
    governor="performance",
    load_average=0.1,
    busy=0.02,
    swap_used_bytes=0,
)
Samples = dict[str, tuple[float, ...]]
SPEED = grid.Speed(load_s=1.0, prefill_s=0.01, decode_s=0.02)


def cell(table: Table = Table.RECONFIGURE, n_tokens: int = 1000, n_ctx: int = 32768) -> Cell:
    return Cell(table=table, n_tokens=n_tokens, n_seq=2, n_ctx=n_ctx, rounds=3)


def reconfigured(n_tokens: int) -> Outcome:
    """Return an outcome whose pause is 4 ms for each 1,000 tokens, twice what two copies take."""
    ms = n_tokens / 250
    return Outcome(
        cell=cell(n_tokens=n_tokens),
        samples={"pause_ms": (ms, 2 * ms, ms), "memcpy_ms": (ms / 4,) * 3, "build_ms": (8.0,) * 3},
        facts={"bytes_held": n_tokens * 2e4, "resident_ratio": 1.04},
    )


def relaunched(n_ctx: int) -> Outcome:
    samples: Samples = {"pause_ms": (10.0, 20.0, 40.0), "change_s": (0.1, 0.2, 0.3)}
    samples |= {"carry_s": (1.0, 2.0, 4.0), "read_again_s": (9.0, 10.0, 11.0)}
    return Outcome(cell=cell(Table.RELAUNCH, n_ctx=n_ctx), samples=samples)


def paged() -> Outcome:
    names = ("page_out", "page_in", "save", "restore", "memcpy", "spill", "spill_alone", "write")
    beside = ("page_out", "page_in", "spill", "grow", "shrink", "save", "restore")
    samples: Samples = {f"{name}_ms": (4.0, 5.0, 6.0) for name in names}
    samples |= {f"beside_{name}_ms": (9.0, 9.5, 9.9) for name in beside}
    samples |= {"gap_ms": (3.0,) * 3, "quiet_ms": (3.5,) * 3}
    lines = tuple(
        Timeline(
            side=side,
            came_ms=(0.0, 10.0, 20.0, 60.0, 70.0),
            marks=(Mark(name=name, start_ms=25.0, end_ms=50.0),),
        )
        for side, name in ((Side.OURS, "page_out"), (Side.BASELINE, "save"))
    )
    return Outcome(
        cell=cell(Table.PAGES), samples=samples, facts={"bytes_held": 2e7}, timelines=lines
    )


def sped() -> Outcome:
    samples: Samples = {
        "ours_prefill_per_s": (99.0, 198.0),
        "baseline_prefill_per_s": (100.0, 200.0),
    }
    samples |= {"ours_decode_per_s": (30.0, 31.0), "baseline_decode_per_s": (30.0, 31.0)}
    return Outcome(cell=cell(Table.SPEED), samples=samples)


EVERY = (
    *(reconfigured(n) for n in (8000, 500, 2000)),
    *(relaunched(n) for n in (131072, 4096)),
    *(paged(), sped()),
)


# Statistics


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.median, found.low, found.high, found.n) == (3.0, 2.0, 4.0, 5)
    assert str(found) == "3.00 (2.00..4.00)"
    assert str(spread([12.34])) == "12.3"


def test_a_ratio_is_taken_round_by_round() -> None:
    """A round in which the machine was ten times slower says the same as the others."""
    assert ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]).high == 0.5


@pytest.mark.parametrize(
    ("value", "shown"), [(1234.5, "1234"), (12.345, "12.3"), (0.5, "0.50"), (0.0123, "0.012")]
)
def test_a_number_has_the_digits_that_count(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_gap_counts_where_any_part_of_it_is_inside() -> None:
    came = [0.0, 0.01, 0.02, 0.06, 0.07]
    assert gaps_ms(came, 0.025, 0.05) == pytest.approx([40.0])
    assert gaps_ms(came, 0.015, 0.025) == pytest.approx([10.0, 40.0])


def test_prompts_are_of_the_model_s_tokens_and_begin_differently() -> None:
    for n_vocab in (128, 49152):
        prompts = [prompt_of(300, seed, n_vocab) for seed in range(1, 17)]
        assert len({prompt[0] for prompt in prompts}) == 16
        assert all(0 < token < n_vocab for prompt in prompts for token in prompt)


def test_a_file_of_so_many_bytes_is_written(tmp_path: Path) -> None:
    assert written_ms(tmp_path / "bytes", 2**20 + 7) > 0
    assert (tmp_path / "bytes").stat().st_size == 2**20 + 7


# The grid


def test_the_grid_shows_scaling_and_not_a_point() -> None:
    every = grid.cells(quick=False, speed=True)
    assert len(every) == len(set(every))
    changed = [each for each in every if each.table is Table.RECONFIGURE]
    assert {each.n_tokens for each in changed if each.n_seq == 2} >= {500, 1000, 2000, 4000, 8000}
    assert {each.n_seq for each in changed} == {1, 2, 4, 8, 16}
    contexts = {each.n_ctx for each in every if each.table is Table.RELAUNCH}
    assert contexts == {4096, 8192, 16384, 32768, 65536, 131072}
    assert {each.table for each in every} == set(Table)


def test_every_conversation_fits_where_it_is_held() -> None:
    for each in grid.cells(quick=False, speed=True):
        n_ctx, n_seq = grid.away(each)
        assert (n_ctx, n_seq) != (each.n_ctx, each.n_seq)
        slots = each.n_seq + 1  # a relaunch has another number of slots
        if each.table is Table.PAGES:
            assert each.n_ctx // 2 >= each.n_tokens + grid.NEIGHBOUR_TOKENS
            n_grown, n_slots = grid.largest(each)
            assert (n_grown // n_slots, n_slots) == (each.n_ctx // 2, 3)
        else:
            assert min(n_ctx // n_seq, each.n_ctx // slots) > each.per_slot + 1


def test_the_first_cells_show_the_ends_of_every_row() -> None:
    first = grid.cells(quick=False, speed=False)[:8]
    assert {each.n_tokens for each in first if each.n_seq == 2} >= {500, 8000}
    assert {each.n_ctx for each in first if each.table is Table.RELAUNCH} == {4096, 131072}


def test_a_quick_grid_is_small_and_one_table_is_one_table() -> None:
    assert 4 * len(grid.cells(quick=True, speed=True)) < 3 * len(
        grid.cells(quick=False, speed=True)
    )
    only = grid.cells(quick=True, speed=True, tables=[Table.PAGES])
    assert {each.table for each in only} == {Table.PAGES}
    assert not grid.cells(quick=True, speed=False, tables=[Table.SPEED])


# Estimate and budget


def test_an_estimate_grows_with_what_is_read() -> None:
    few, many = (grid.estimate_s(cell(n_tokens=n), SPEED) for n in (1000, 5000))
    assert many - few == pytest.approx(4000 * SPEED.prefill_s)
    again = grid.estimate_s(cell(Table.RELAUNCH), SPEED)
    assert again > grid.estimate_s(cell(), SPEED) + 3 * 1000 * SPEED.prefill_s


def test_a_budget_learns_from_what_cells_took() -> None:
    budget = grid.Budget(100.0)
    assert budget.fits(100.0)
    budget.spend(10.0, 30.0)
    assert budget.factor == 3.0
    assert budget.fits(23.0)
    assert not budget.fits(24.0)


# What was finished


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Record]:
    found = Record(tmp_path / "bench" / "cells.jsonl", "these")
    yield found
    found.close()


@contextmanager
def file_size_max(n_bytes: int) -> Iterator[None]:
    """Have no file grow beyond this; Python ignores the signal, so that a write is told."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def reopened(kept: Record, conditions: str = "these") -> list[Outcome]:
    """Return what another run finds there."""
    kept.close()
    found = Record(kept.path, conditions)
    found.close()
    return [*found.finished.values()]


def test_what_was_finished_is_there_again(kept: Record) -> None:
    for outcome in EVERY:
        kept.add(outcome)
    assert reopened(kept) == [*EVERY]
    assert kept.path.stat().st_mode & 0o777 == 0o600
    assert kept.path.parent.stat().st_mode & 0o777 == 0o700


def test_cells_of_another_engine_or_model_are_not_taken(kept: Record) -> None:
    kept.add(reconfigured(500))
    assert reopened(kept, "others") == []


def test_a_cell_that_is_measured_anew_takes_the_place_of_itself_alone(kept: Record) -> None:
    kept.add(reconfigured(500))
    kept.add(reconfigured(1000))
    anew = reconfigured(500).model_copy(update={"machine": QUIET})
    kept.add(anew)
    skipped = Outcome(cell=reconfigured(1000).cell, why_not="a neighbour was cut off")
    kept.add(skipped)
    assert reopened(kept) == [anew, reconfigured(1000)]


@pytest.mark.parametrize("room", [0, 20])
def test_a_full_disk_costs_the_cell_that_it_has_no_room_for(kept: Record, room: int) -> None:
    """A file that may grow by so many bytes is a disk that has so many left."""
    kept.add(reconfigured(500))
    whole = kept.path.read_bytes()
    with file_size_max(len(whole) + room):
        kept.add(reconfigured(1000))
    assert (kept.n_lost, kept.why_lost) == (1, "File too large")
    assert kept.path.read_bytes() == whole
    kept.add(reconfigured(2000))
    assert reopened(kept) == [reconfigured(500), reconfigured(2000)]


def test_a_line_that_was_cut_short_costs_that_cell_alone(kept: Record) -> None:
    kept.add(reconfigured(500))
    kept.add(reconfigured(1000))
    kept.close()
    whole = kept.path.read_bytes()
    kept.path.write_bytes(b'{"conditions": 1}\n\xff\n' + whole[:-20])
    again = Record(kept.path, "these")
    assert ([*again.finished.values()], again.unreadable) == ([reconfigured(500)], 3)
    again.add(reconfigured(2000))
    assert reopened(again) == [reconfigured(500), reconfigured(2000)]


def test_two_do_not_measure_each_other(kept: Record) -> None:
    kept.add(reconfigured(500))
    with pytest.raises(RefusedError) as refused:
        Record(kept.path, "these")
    assert refused.value.code == "bench_running"
    assert reopened(kept) == [reconfigured(500)]


def test_conditions_are_the_programs_the_model_and_the_processor(tmp_path: Path) -> None:
    program, model = tmp_path / "program", tmp_path / "model"
    program.write_bytes(b"one")
    model.write_bytes(b"weights")

    def name(cpu: str = "A") -> str:
        return record.digest(record.conditions({"engine": program}, model, cpu))

    first = name()
    assert name() == first
    assert name("B") != first
    program.write_bytes(b"two")
    assert name() != first


# The run


def run(kept: Record, cells: list[Cell], budget_s: float = 1e6) -> list[Outcome]:
    """Run with a program that cannot be started."""
    nowhere = Path("/nowhere/llama-server")
    subject, budget = Subject(nowhere, nowhere, nowhere), grid.Budget(budget_s)
    return list(runner.run(cells, subject, kept, SPEED, budget, QUIET, lambda *_: None))


def test_a_cell_that_fails_says_where_and_is_measured_the_next_time(kept: Record) -> None:
    (found,) = run(kept, [cell()])
    assert (found.failed, found.machine) == (True, QUIET)
    assert found.why_not.startswith("engines start: the engine ended with status 1: ")
    assert "FileNotFoundError" in found.why_not
    assert reopened(kept) == []


def test_what_does_not_fit_into_the_budget_is_left_out(kept: Record) -> None:
    assert run(kept, [cell(n_tokens=8000)], budget_s=80.0) == []


# Trust


def on(machine: Machine, *outcomes: Outcome) -> list[Outcome]:
    """Return them, or all there are, as measured on this machine."""
    return [each.model_copy(update={"machine": machine}) for each in outcomes or EVERY]


def test_a_quiet_machine_is_trusted() -> None:
    assert doubts(on(QUIET)) == []


@pytest.mark.parametrize(
    ("machine", "outcome", "said"),
    [
        ({"busy": 0.5}, {}, "50% of the processors was in use before the run that measured 1 of 2"),
        ({"governor": "powersave"}, {}, "the governor powersave"),
        ({}, {"others": 0.25}, "other programs took up to 25% of the processors in 1 of 2 cells"),
        ({}, {"swapped_bytes": 3 * 2**20}, "3 MiB went to swap"),
    ],
)
def test_what_disturbs_is_said(
    machine: dict[str, object], outcome: dict[str, object], said: str
) -> None:
    outcome |= {"machine": QUIET.model_copy(update=machine)}
    found = reconfigured(500).model_copy(update=outcome)
    (doubt,) = doubts([found, *on(QUIET, reconfigured(1000))])
    assert said in doubt


def test_our_own_work_is_not_taken_for_that_of_others() -> None:
    """On a machine of any load: what we burn is told apart, so the two are never more than all."""
    watch = Watch()
    n = 0
    while watch.took_s < 0.2:
        n += 1
    assert 0.0 <= watch.others() < 1.0
    assert watch.swapped_bytes() >= 0


# The report


def report(*outcomes: Outcome) -> Report:
    return Report(
        model="model.gguf",
        engine="llama-server",
        baseline="/b/llama-server",
        against="the same engine",
        outcomes=outcomes,
        n_cells=len(outcomes) + 2,
        took_s=12.0,
    )


def test_tables_are_in_order_and_ratios_are_paired() -> None:
    changed, beside, pages, speed = tables(EVERY)
    assert [row[0] for row in changed.rows] == ["500", "2000", "8000"]
    assert changed.rows[0][3:7] == (
        "10.0",
        "2.00 (2.00..3.00)",
        "0.50 (0.50..0.50)",
        "2.00 (2.00..3.00)",
    )
    assert [row[2] for row in beside.rows] == ["4096", "131072"]
    assert beside.rows[0][-2] == "100 (100..100)"
    assert ("page_out ÷ memcpy", "1.00 (1.00..1.00)") in pages.rows
    assert speed.rows[0] == ("prefill", "148 (124..173)", "150 (125..175)", "0.990 (0.990..0.990)")


def test_markdown_has_tables_the_machine_and_what_is_missing() -> None:
    skipped = Outcome(cell=cell(n_tokens=8000), why_not="the model takes | 2048 tokens")
    text = report(*on(QUIET), skipped).markdown()
    assert text.count("### ") == 4
    assert "\n- machine: A processor (x86_64), 2 cores, 8.0 GiB, Linux 6.0, " in text
    assert "- skipped: reconfigure: 8000 tokens, 32768 x 2: the model takes" in text
    assert "medians" in text
    assert "not to be trusted" not in text
    busy = QUIET.model_copy(update={"busy": 0.9})
    assert "- not to be trusted: 90%" in report(*on(busy)).markdown()


def test_a_machine_is_told_as_it_was_when_the_cells_were_measured() -> None:
    """Those of two runs have two; what this run found plays no part where it measured nothing."""
    other = QUIET.model_copy(update={"load_average": 3.5})
    shown = report(*on(QUIET), *on(other, reconfigured(1000)))
    assert shown.machines == [QUIET, other]
    assert shown.markdown().count("\n- machine: ") == 2
    assert [each["load_average"] for each in shown.data()["machines"]] == [0.1, 3.5]


def test_json_has_every_round() -> None:
    said = json.loads(json.dumps(report(*EVERY).data()))
    assert (said["trusted"], said["cells_wanted"], said["cells_left"]) == (True, 9, 2)
    assert said["cells"][0]["samples"]["pause_ms"] == [32.0, 64.0, 32.0]
    assert said["cells"][0]["cell"]["table"] == "reconfigure"
    assert not report().data()["trusted"], "there is nothing to trust"


# Plots


def texts(path: Path) -> set[str]:
    """Return all text of an SVG file."""
    found = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return {"".join(each.itertext()) for each in found}


def test_plots_say_what_they_show(tmp_path: Path) -> None:
    tokens, contexts, neighbour = plots.write(tmp_path / "plots", EVERY, "an old build")
    assert {"tokens held, in all slots", "ms", "pause"} <= texts(tokens)
    assert {"n_ctx", "4k", "128k", "live change: pause", "relaunch, prompts read again"} <= texts(
        contexts
    )
    assert {"gap, ms", "page_out", "save", "slot files of an old build"} <= texts(neighbour)


def test_the_same_numbers_make_the_same_file(tmp_path: Path) -> None:
    one, other = (plots.write(tmp_path / name, EVERY, "it") for name in "ab")
    for path, again in zip(one, other, strict=True):
        assert path.read_bytes() == again.read_bytes()


def test_there_is_no_plot_of_what_was_not_measured(tmp_path: Path) -> None:
    assert plots.write(tmp_path, [sped()], "it") == []
    (only,) = plots.write(tmp_path, [relaunched(4096), sped()], "it")
    assert only.name == "pause-against-context.svg"
