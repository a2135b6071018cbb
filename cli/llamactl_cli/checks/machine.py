"""Checks of the machine: python, tools for a build, engine, processor, limits, memory."""

from __future__ import annotations

import platform
import resource
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import memory as host

from llamactl_cli import smaps, text, versions
from llamactl_cli.checks import fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamactl_cli.checks import Finding
    from llamactl_cli.checks.case import Case

CPUINFO = Path("/proc/cpuinfo")
LOCK_OPTIONS = {"--mlock"}
ENGINE_S = 2.0
SPARE_BYTES = 256 * 2**20
"""What a machine should have left beside an engine whose contexts are full."""


def python(_: Case) -> Iterator[Finding]:
    """Which interpreter runs this, and the daemon that it starts."""
    yield ok("python", f"{platform.python_version()}, {sys.executable}")


def engine(case: Case) -> Iterator[Finding]:
    """Whether there is an engine that runs, or what its build lacks."""
    from llamactl_builder.build import cached_engine
    from llamactl_builder.errors import BuilderError

    given = None if case.request is None else case.request.engine_path
    try:
        built = cached_engine()
    except BuilderError as exc:
        built = None
        if given is None:
            yield fail("build", exc.message, exc.hint or "see the message")
        else:
            yield warn("build", f"no engine can be built: {exc.message}", exc.hint or "")
    else:
        own = [name for name in ("cmake", "ninja") if shutil.which(name) is None]
        more = f"; {' and '.join(own)} come from a package of ours" if own else ""
        yield ok("build", f"a compiler is there{more}")
    path = given or (None if built is None else str(built))
    if path is None:
        yield warn("engine", "none is built yet", "`llamactl build`; `llamactl up` does it too")
        return
    version = versions.of_engine(path, ENGINE_S)
    if version is None:
        yield fail("engine", f"{path} does not say its version", f"{path} --version says why")
    else:
        yield ok("engine", f"{version}, {path}")


def processor(_: Case) -> Iterator[Finding]:
    """Whether the processor has what the kernel does not grant."""
    from llamactl_builder.cpu import kernel_grants_amx

    advertised = "amx_tile" in CPUINFO.read_text("utf-8", errors="replace")
    if advertised and not kernel_grants_amx():
        note = "AMX is advertised and not granted: our builds leave it out"
        yield ok("processor", f"{note}, another llama-server may die of it")
    else:
        yield ok("processor", f"{platform.machine()}, AMX {'granted' if advertised else 'absent'}")


def memory_lock(case: Case) -> Iterator[Finding]:
    """Whether an engine that locks its memory may."""
    asked = bool(LOCK_OPTIONS & set(() if case.spec is None else case.spec.extra_args))
    most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = most == resource.RLIM_INFINITY
    limit = "unlimited" if free else text.size(most)
    if asked and not free:
        do = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service"
        yield warn("memlock", f"--mlock is asked for, the limit is {limit}", do)
    else:
        yield ok("memlock", f"{limit}{'' if asked else ', not asked for'}")


def memory(case: Case) -> Iterator[Finding]:
    """Whether what the engine may come to take is there: by the machine and by every cgroup."""
    pid = case.engine_pid
    there = host.available(to=pid)
    free = "what is free is not known"
    if there is not None:
        free = f"{text.size(there.n_bytes)} free ({there.limit})"
    do = "a smaller context (`llamactl reconfigure`), or a higher limit"
    needed, what = _needed(case, pid)
    more = "an unknown amount" if needed is None else text.size(needed)
    told = f"{free}; {what} may take {more} more"
    short = there is None or (needed or 0) + SPARE_BYTES > there.n_bytes
    yield warn("memory", told, do) if short else ok("memory", told)
    found = None if pid is None else smaps.resident(pid, case.model)
    if found is not None and found.swapped_bytes:
        gone = f"{text.size(found.swapped_bytes)} of the engine are swapped out"
        yield warn("swap", gone, "every token waits for the disk; take a smaller context")
    else:
        yield ok("swap", "nothing of an engine is swapped out")


def _needed(case: Case, pid: int | None) -> tuple[int | None, str]:
    """Return how many bytes are not resident yet and may become so, and of what; None: unknown."""
    if pid is None:
        path = None if case.model is None else Path(case.model)
        return (path.stat().st_size, "the weights") if path and path.is_file() else (0, "nothing")
    found = smaps.resident(pid, case.model)
    if found is None:
        return None, "the engine"
    untouched = found.committed_bytes - found.anonymous_bytes - found.swapped_bytes
    return max(0, untouched), "what the engine has committed"


CHECKS = (python, engine, processor, memory_lock, memory)
