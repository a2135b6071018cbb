"""What a process has from its caller, taken down so that the daemon can give it to the engine."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ENV_PREFIXES = (
    *("LLAMA_", "GGML_", "MTMD_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "VK_"),
    *("OMP_", "GOMP_", "KMP_", "HF_", "LD_"),
)
ENV_NAMES = ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
"""Not every XDG_ name: those of a session differ at each login, and mean nothing to an engine."""
LIMITS = ("AS", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "RTPRIO", "STACK")


def take(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the context, as `ProcessContext` of the control API has it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return {
        "cwd": os.getcwd(),  # noqa: PTH109 - the text is all that is wanted
        "umask": umask,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "rlimits": {
            name: list(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))) for name in LIMITS
        },
        "env": {
            name: value
            for name, value in sorted(env.items())
            if name.startswith(ENV_PREFIXES) or name in ENV_NAMES
        },
    }
