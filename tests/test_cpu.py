"""What a native build may use, asked from the compiler and the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl_builder import cpu, toolchain

if TYPE_CHECKING:
    from pathlib import Path


def fake_compiler(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


def test_amx_is_read_from_what_the_compiler_switches_on(tmp_path: Path) -> None:
    compiler = fake_compiler(
        tmp_path / "cc",
        "echo '#define __AMX_TILE__ 1'; echo '#define __AMX_INT8__ 1'; echo '#define __AVX2__ 1'",
    )
    native = cpu.detect(compiler)
    assert native.amx == ("AMX_INT8", "AMX_TILE")
    assert native.amx_off == ("-mno-amx-int8", "-mno-amx-tile")
    assert native.amx_granted == cpu.kernel_grants_amx()


def test_no_amx_asks_no_kernel(tmp_path: Path) -> None:
    native = cpu.detect(fake_compiler(tmp_path / "cc", "echo '#define __AVX2__ 1'"))
    assert (native.amx, native.amx_off, native.amx_granted) == ((), (), True)


def test_a_compiler_without_native_mode_is_no_error(tmp_path: Path) -> None:
    assert cpu.detect(fake_compiler(tmp_path / "cc", "exit 1")).amx == ()


def test_the_real_compiler_answers_alike_twice() -> None:
    compiler = toolchain.find_compiler("CXX").path
    assert cpu.detect(compiler) == cpu.detect(compiler)
    assert "#define" in cpu.detect(compiler).macros
