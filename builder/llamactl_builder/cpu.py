"""What a native build may use: the instruction sets the compiler sees and the kernel grants.

A virtual machine can advertise AMX in CPUID while its kernel refuses the tile state; a binary
built with -march=native then dies at its first matrix multiplication. So what the compiler would
switch on is asked from the compiler, and whether it may run is asked from the kernel.
"""

from __future__ import annotations

import ctypes
import platform
import re
from dataclasses import dataclass

from llamactl_builder import toolchain
from llamactl_builder.errors import ToolError

SYS_ARCH_PRCTL = 158  # x86-64
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18
AMX_MACRO = re.compile(r"^#define __(AMX_[A-Z0-9_]+?)__ 1$", re.MULTILINE)


@dataclass(frozen=True)
class Native:
    """What `-march=native` means here; `macros` is what the compiler predefines then."""

    macros: str
    amx: tuple[str, ...]
    amx_granted: bool

    @property
    def amx_off(self) -> tuple[str, ...]:
        """The compiler flags that leave every AMX instruction set out."""
        return tuple(f"-mno-{name.lower().replace('_', '-')}" for name in self.amx)


def detect(compiler: str) -> Native:
    """Ask compiler and kernel; a compiler that knows no native mode has no AMX to lose."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    flag = "-march=native" if x86 else "-mcpu=native"
    try:
        macros = toolchain.run(compiler, flag, "-E", "-dM", "-x", "c", "/dev/null")
    except ToolError:
        macros = platform.processor()
    amx = tuple(sorted(AMX_MACRO.findall(macros)))
    return Native(macros, amx, amx_granted=not amx or kernel_grants_amx())


def kernel_grants_amx() -> bool:
    """Request the tile state for this process, as the engine would."""
    request = (ctypes.c_long(value) for value in (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA))
    return bool(ctypes.CDLL(None).syscall(ctypes.c_long(SYS_ARCH_PRCTL), *request) == 0)
