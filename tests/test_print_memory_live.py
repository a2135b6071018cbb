"""`llama-server --print-memory-json`: what a start would take, told without taking it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from live_engine import N_CTX, N_SEQ, live_engine

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1024 * 1024
CELL_BYTES = 64
"""Kept on the host for each cell beside the KV cache, which a reconfigure counts apart."""


BETWEEN = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""
"""Small, because a process begins with the most that was resident of the one it comes of."""


def asked(engine: Path, *args: object) -> tuple[int, str, str, int]:
    """Run the engine for its answer: exit code, stdout, stderr, and the most that was resident."""
    words = [str(engine), "--print-memory-json", *map(str, args)]
    done = subprocess.run(
        [sys.executable, "-S", "-c", BETWEEN, *words], capture_output=True, text=True, check=False
    )
    *said, resident = done.stderr.splitlines(keepends=True)
    return done.returncode, done.stdout, "".join(said), int(resident) * 1024


def answer(engine: Path, *args: object) -> dict[str, Any]:
    """Return its JSON."""
    code, out, err, _ = asked(engine, *args)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def host(found: dict[str, Any]) -> dict[str, Any]:
    """Return what it says of the host, the one device of a machine without others."""
    (device,) = found["devices"]
    assert (device["name"], device["is_host"]) == ("CPU", True)
    assert 0 < device["free"] <= device["total"]
    checked: dict[str, Any] = device
    return checked


def test_the_numbers_are_those_of_a_start_and_of_a_dry_run(
    engine_path: Path, model_path: Path
) -> None:
    geometry = ("--ctx-size", N_CTX, "--parallel", N_SEQ)
    found = answer(engine_path, "--model", model_path, *geometry)
    assert (found["n_ctx"], found["n_seq"], found["kv_unified"]) == (N_CTX, N_SEQ, False)
    assert found["left_out"] == []
    told = host(found)
    with live_engine(engine_path, model_path, "--verbosity", "4") as live:
        logged = {
            name: sum(map(float, re.findall(rf"{name} buffer size = +([\d.]+) MiB", live.log())))
            for name in ("model", "KV", "compute")
        }
        larger = live.reconfigure(n_ctx=4 * N_CTX, n_seq=2 * N_SEQ, dry_run=True).receipt
        assert live.props()["build_info"].endswith(found["build"])
    cells = CELL_BYTES * N_CTX
    assert told["model"] / MIB == pytest.approx(logged["model"], abs=0.02)
    assert (told["context"] - cells) / MIB == pytest.approx(logged["KV"], abs=0.02)
    assert told["compute"] / MIB == pytest.approx(logged["compute"], abs=0.02)
    geometry = ("--ctx-size", 4 * N_CTX, "--parallel", 2 * N_SEQ)
    told = host(answer(engine_path, "--model", model_path, *geometry))
    needed = told["context"] - 4 * cells + told["compute"]
    assert needed == sum(larger["bytes_needed"].values())


def test_what_is_large_is_told_and_not_taken(engine_path: Path, model_path: Path) -> None:
    args = ("--model", model_path, "--ctx-size", 4 * 131072, "--parallel", 4)
    code, out, err, resident = asked(engine_path, *args)
    assert code == 0, err
    told = host(json.loads(out))
    assert told["context"] > 4 * 131072 * 23040
    assert resident < 400 * MIB


def test_the_geometry_is_what_the_server_would_make_of_it(
    engine_path: Path, model_path: Path
) -> None:
    found = answer(engine_path, "--model", model_path)
    assert (found["n_ctx"], found["n_seq"], found["kv_unified"]) == (8192, 4, True)
    found = answer(engine_path, "--model", model_path, "--ctx-size", 1000, "--parallel", 3)
    assert (found["n_ctx"], found["n_seq"], found["kv_unified"]) == (1536, 3, False)
    found = answer(engine_path, "--model", model_path, "--kv-unified-per-slot", 512)
    assert (found["n_ctx"], found["n_seq"], found["kv_unified"]) == (2048, 4, True)


def test_a_draft_is_counted_and_what_is_not_is_named(engine_path: Path, model_path: Path) -> None:
    args = ("--model", model_path, "--ctx-size", 2048, "--parallel", 2)
    alone = host(answer(engine_path, *args))
    with_draft = answer(engine_path, *args, "--model-draft", model_path)
    assert with_draft["left_out"] == []
    both = host(with_draft)
    assert (both["model"], both["context"]) == (2 * alone["model"], 2 * alone["context"])
    assert both["compute"] > alone["compute"]
    others = ("--mmproj", "none.gguf", "--lora", "none.gguf", "--control-vector", "none.gguf")
    found = answer(engine_path, *args, *others)
    assert found["left_out"] == ["mmproj", "lora", "control_vector"]
    assert host(found) | {"free": 0} == alone | {"free": 0}


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), "needs the file of a model"),
        (("--hf-repo", "nobody/nothing"), "needs the file of a model"),
        (("--model", "none.gguf"), "none.gguf"),
        (("--ctx-size", 2**31 - 1), "bytes beside its KV cache"),
        (("--ctx-size", 64, "--parallel", 64, "--batch-size", 32), "64 slots need a batch"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_what_no_server_starts_with_is_refused(
    engine_path: Path, model_path: Path, args: tuple[object, ...], named: str
) -> None:
    if "--ctx-size" in args:
        args = ("--model", model_path, *args)
    code, out, err, _ = asked(engine_path, *args)
    assert (code, out) == (1, "")
    assert named in err
