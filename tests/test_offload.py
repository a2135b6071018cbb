"""Whether an engine of `llamactl run` lingers where others were promised the memory: on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import args, offload
from llamactl_supervisor.runs import on_gpu

if TYPE_CHECKING:
    from pathlib import Path

    from llamactl_supervisor.option_table import ArgsAnswer

DRAFT, PROJECTOR = ("-md", "d.gguf"), ("--mmproj", "p.gguf")
KEPT = ("-ngl", "0")
GPU = "  CUDA0: NVIDIA A100 (40960 MiB, 40000 MiB free)"
BLAS = "  BLAS: OpenBLAS (0 MiB, 0 MiB free)"


def answer(engine: Path, home: Path, *argv: str, **env: str) -> ArgsAnswer:
    words = [str(engine), "-m", "m.gguf", *argv]
    return args.ask(words, {"XDG_CONFIG_HOME": str(home)} | env)


@pytest.mark.parametrize(
    ("argv", "env", "goes"),
    [
        ((), {}, True),
        (("-ngl", "auto"), {}, True),
        (("-ngl", "all"), {}, True),
        (("--n_gpu_layers", "12"), {}, True),
        (("-ngl", "-1"), {}, True),
        (KEPT, {}, False),
        (("-ngl", "99", "--gpu-layers", "0"), {}, False),
        (("-dev", "none"), {}, False),
        ((), {"LLAMA_ARG_N_GPU_LAYERS": "0"}, False),
        (("-ngl", "1"), {"LLAMA_ARG_N_GPU_LAYERS": "0"}, True),
        ((), {"LLAMA_ARG_DEVICE": "none"}, False),
        ((*KEPT, *DRAFT), {}, True),
        ((*KEPT, *DRAFT, "-ngld", "0"), {}, False),
        ((*KEPT, *DRAFT, "-devd", "none"), {}, False),
        (("-dev", "none", *DRAFT), {}, False),
        ((*KEPT, *PROJECTOR), {}, True),
        ((*KEPT, *PROJECTOR, "--no-mmproj-offload"), {}, False),
    ],
)
def test_what_goes_to_a_device_if_there_is_one(
    engine_path: Path, tmp_path: Path, argv: tuple[str, ...], env: dict[str, str], goes: bool
) -> None:
    """As the real engine reads it, environment included: no `-ngl` is `auto`."""
    assert offload.asked(answer(engine_path, tmp_path, *argv, **env)) is goes


def test_a_configuration_file_counts(engine_path: Path, tmp_path: Path) -> None:
    config = tmp_path / "llama.cpp" / "config.ini"
    config.parent.mkdir()
    config.write_text("ngl = 0\n")
    assert offload.asked(answer(engine_path, tmp_path)) is False
    assert offload.asked(answer(engine_path, tmp_path, "-ngl", "5")) is True


def lister(path: Path, *devices: str) -> str:
    """Return a program that lists these devices and counts how often it was asked."""
    said = "\n".join(["Available devices:", *(devices or ["  (none)"])])
    path.write_text(f"#!/bin/sh\necho >> {path}.asked\ncat << 'END'\n{said}\nEND\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("devices", "found"), [((), False), ((BLAS,), False), ((GPU,), True), ((BLAS, GPU), True)]
)
def test_what_holds_weights_is_a_device(
    tmp_path: Path, devices: tuple[str, ...], found: bool
) -> None:
    engine = lister(tmp_path / "engine", *devices)
    assert args.has_devices(engine, {}) is found


def test_devices_are_asked_for_once_in_each_environment(tmp_path: Path) -> None:
    """To wake a GPU takes longer than a live start."""
    engine = lister(tmp_path / "engine", GPU)
    for env in ({}, {}, {"CUDA_VISIBLE_DEVICES": ""}, {}):
        assert args.has_devices(engine, env)
    assert (tmp_path / "engine.asked").read_text().count("\n") == 2
    assert not args.has_devices(str(tmp_path / "none"), {})


def test_both_are_needed(engine_path: Path, tmp_path: Path) -> None:
    gpu, none = lister(tmp_path / "gpu", GPU), lister(tmp_path / "none")
    everything, nothing = answer(engine_path, tmp_path), answer(engine_path, tmp_path, *KEPT)
    found = [on_gpu(each, at, {}) for each in (everything, nothing) for at in (gpu, none)]
    assert found == [True, False, False, False]
