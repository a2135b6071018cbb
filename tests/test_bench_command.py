"""`llamactl bench`: what is asked of the command, and one run of it on real engines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING
from unittest import mock

import gguf
import pytest
from cli_home import COMMAND, Home, fresh_home
from llamactl_bench import plots
from llamactl_validate.workplace import PREFIX
from sandbox import FAKE_ENGINE, WITHIN_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiny_models import TinyModels

N_CTX_LONG = 32768


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


@pytest.fixture
def long_model(tiny: TinyModels, tmp_path: Path) -> Path:
    """A tiny model that takes more than 256 tokens in a slot."""
    path = tmp_path / "long.gguf"
    shutil.copy(tiny.model("llama-dense"), path)
    path.chmod(0o600)
    field = gguf.GGUFReader(path, "r+").fields["llama.context_length"]
    field.parts[-1][0] = N_CTX_LONG
    return path


def bench(home: Home, *words: str) -> tuple[str, ...]:
    return ("bench", "--engine", str(FAKE_ENGINE), "--model", str(home.model), *words)


def test_the_grid_is_listed_without_an_engine(home: Home) -> None:
    every = home.run("bench", "--list", "--json").result["cells"]
    assert {each["table"] for each in every} == {"reconfigure", "relaunch", "pages"}
    compared = home.run("bench", "--list", "--json", "--baseline", "unpatched").result["cells"]
    assert {each["table"] for each in compared} - {each["table"] for each in every} == {"speed"}
    listed = home.run("bench", "--list", "--quick", "-t", "relaunch").out.splitlines()
    assert listed[0].split("  ")[0] == "table"
    assert {line.split()[0] for line in listed[1:]} == {"relaunch"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--table", "chairs"), "there is no table 'chairs'; there are reconfigure, relaunch,"),
        (("--table", "speed"), "--table speed: compares two engines: name the other one with"),
        (("--baseline", "/bin/true"), "/bin/true is no llama-server: it does not say its version"),
        (("--budget", "soon"), "must be a time span (90s, 20m, 2h), not 'soon'"),
        (("--budget", "0m"), "must be a time span"),
        (("--engine", "/nowhere/llama-server"), "/nowhere/llama-server is not a program"),
        (("--model", "/nowhere/a.gguf"), "/nowhere/a.gguf"),
        (("--plots", "/dev/null/plots"), "/dev/null/plots cannot be written"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_starts(
    home: Home, words: tuple[str, ...], said: str
) -> None:
    ran = home.run("bench", *words)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_a_baseline_is_a_program(home: Home) -> None:
    ran = home.run(*bench(home, "--baseline", "/nowhere/llama-server"))
    assert (ran.code, ran.out) == (2, "")
    assert "/nowhere/llama-server is not a program" in ran.err


def test_a_model_that_no_engine_loads_is_not_run(home: Home, engine_path: Path) -> None:
    home.model.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    words = ("bench", "--engine", str(engine_path), "--model", str(home.model), "--json")
    for ran in (home.run(*words), home.run(*words, "--yes")):
        assert (ran.code, ran.error["code"]) == (2, "engine_spawn_failed")
        assert ran.error["message"].startswith("not run: the engine would not load this: ")


@pytest.mark.parametrize(
    ("budget", "why", "help_"),
    [
        ("1s", "1 cell left out for the budget", "give it more time with --budget"),
        ("20m", "1 cell skipped", "the report says what each lacks: memory, or a model that takes"),
    ],
)
def test_to_have_measured_nothing_is_no_success(
    home: Home, engine_path: Path, tiny: TinyModels, budget: str, why: str, help_: str
) -> None:
    """The cell wants more than the 256 tokens that the model takes in a slot."""
    words = ("bench", "--engine", str(engine_path), "--model", str(tiny.model("llama-dense")))
    ran = home.run(*words, "--quick", "-t", "pages", "--budget", budget, "--json")
    error, said = json.loads(ran.err)["error"], json.loads(ran.out)
    assert (ran.code, error["code"], said["trusted"]) == (1, "nothing_measured", False)
    assert error["message"] == f"nothing was measured: {why}"
    assert error["hint"].startswith(help_)


def test_plots_are_refused_first_where_the_library_is_missing(home: Home) -> None:
    with mock.patch.object(plots, "find_spec", return_value=None):
        ran = home.run(*bench(home, "--plots", str(home.root), "--json"))
    assert (ran.code, ran.error["code"]) == (2, "plots_unavailable")
    assert f"{sys.executable} -m pip install matplotlib" in ran.error["hint"]


def test_what_does_not_fit_is_not_run(home: Home) -> None:
    """The fake engine has a device with one byte left."""
    ran = home.run(*bench(home, "--json"))
    assert (ran.code, ran.error["code"]) == (2, "does_not_fit")


def test_an_engine_that_does_not_start_fails_each_cell_and_is_tried_again(home: Home) -> None:
    words = bench(home, "--quick", "-t", "reconfigure", "--yes")
    ran = home.run(*words, "--json")
    said = json.loads(ran.out)
    assert (ran.code, said["cells_left"]) == (1, 0)
    assert all(each["failed"] for each in said["cells"])
    assert home.run(*words, "--resume").code == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_report_of_what_was_measured_and_nothing_else(
    home: Home, engine_path: Path, long_model: Path, number: signal.Signals
) -> None:
    """To the command alone, twice, while a relaunch has two engines."""
    place = home.root / "t"
    place.mkdir()
    words = ["bench", "--engine", str(engine_path), "--model", str(long_model), "--quick"]
    words += ["-t", "reconfigure", "-t", "relaunch"]
    env, pipe = os.environ | {"TMPDIR": str(place)}, subprocess.PIPE
    command = [*COMMAND, *words, "--json"]
    cells = home.paths.cache / "bench" / "cells.jsonl"
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=env) as process:
        until(lambda: cells.is_file() and cells.read_bytes())
        until(lambda: len([*place.glob(f"{PREFIX}*/engine.sock")]) == 2)
        process.send_signal(number)
        process.send_signal(number)
        out, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + number, err
    assert json.loads(err)["error"]["code"] == "interrupted"
    said = json.loads(out)
    n_there = len(said["cells"])
    assert said["interrupted"]
    assert not any(each["failed"] for each in said["cells"])
    assert (said["cells_left"], n_there) == (said["cells_wanted"] - n_there, n_there)
    assert n_there >= 1
    assert [*place.iterdir()] == []
    shown = home.run(*words, "--resume", "--budget", "1s")
    assert f"{n_there} cells measured before" in shown.err.replace("1 cell ", "1 cells ")


def test_a_run_measures_keeps_and_goes_on(
    home: Home, engine_path: Path, long_model: Path, tmp_path: Path
) -> None:
    """The baseline is the same engine: what is shown here is the command, not its numbers."""
    words = ["bench", "--engine", str(engine_path), "--baseline", str(engine_path), "--quick"]
    words += ["--model", str(long_model), "--budget", "2h"]
    one = home.run(*words, "-t", "reconfigure", "--json")
    assert one.code == 0, one
    first = json.loads(one.out)
    assert first["cells_left"] == 0
    for cell in first["cells"]:
        assert cell["why_not"] == ""
        assert len(cell["samples"]["pause_ms"]) == cell["cell"]["rounds"] == 3
        assert min(cell["samples"]["pause_ms"]) > 0
        assert cell["facts"]["bytes_held"] > 0
    every = home.run(*words, "--resume", "--json", "--plots", str(tmp_path / "plots"))
    assert every.code == 0, every
    said = json.loads(every.out)
    kept = [each for each in said["cells"] if each["cell"]["table"] == "reconfigure"]
    assert kept == first["cells"]
    by_table = {each["cell"]["table"]: each for each in said["cells"]}
    assert by_table.keys() == {"reconfigure", "relaunch", "pages", "speed"}
    assert all(each["why_not"] == "" for each in said["cells"]), said["cells"]
    assert min(by_table["relaunch"]["samples"]["carry_s"]) > 0
    marks = [mark["name"] for line in by_table["pages"]["timelines"] for mark in line["marks"]]
    assert marks == ["page_out", "spill", "page_in", "grow", "shrink", "save", "restore"]
    assert len(list((tmp_path / "plots").glob("*.svg"))) == 3
    anew = home.run(*words, "--budget", "1s")
    assert f"{len(said['cells'])} cells measured before: kept until measured anew" in anew.err
    assert (anew.code, "nothing was measured" in anew.err) == (1, True)
    shown = home.run(*words, "--resume", "--markdown", "--budget", "1s")
    assert shown.code == 0
    assert shown.out.count("### ") == 4
    assert "to measure" not in shown.err
    machines = [line for line in shown.out.splitlines() if line.startswith("- machine: ")]
    measured_on = {json.dumps(each["machine"], sort_keys=True) for each in said["cells"]}
    assert len(machines) == len(said["machines"]) == len(measured_on)
