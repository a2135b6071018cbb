"""The command line and environment of an engine, and the order that its holder is given."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

from llamactl_supervisor.fields import AUTO, OWNED_ENV, option_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.models import EngineRequest, Override, ProcessContext, UpRequest
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.settings import Settings

ENGINE_OOM_SCORE_ADD = 200
"""Raised so that the kernel, short of memory, takes the engine and not the daemon."""
LAST_LINES_MAX = 60
"""Lines of output kept in RAM for the exit record."""

QUIET = "--quiesced"
_PAGES_OPTION = "--slot-save-path"
_ADDED_ENV = {"GGML_NO_BACKTRACE": "1"}
_CALLERS_PREFIXES = (
    *("LLAMA_", "GGML_", "MTMD_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "VK_"),
    *("OMP_", "GOMP_", "KMP_", "HF_", "LD_"),
)
_CALLERS_NAMES = frozenset(["XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"])
"""As `llamactl_cli/run/context.py` takes them down."""


def instance_id(seed: UUID, generation: int) -> str:
    """Return the name of the engine process `generation`; `seed` is drawn once per daemon."""
    return uuid5(seed, str(generation)).hex


def live_spec(spec: EngineRequest, override: Override | None) -> EngineRequest:
    """Return `spec` with the geometry that was last set live, if any."""
    return spec if override is None else override.on(spec)


def engine_argv(
    request: UpRequest,
    override: Override | None,
    instance: str,
    paths: Paths,
    keys: Path | None = None,
    *,
    quiet: bool = False,
) -> list[str]:
    """Return the engine's whole command line. No secret is ever part of it.

    `keys` is the file with the user's API keys and ours, where the engine is to ask for one.
    `quiet`: requests are to wait until conversations have been brought back.
    """
    spec = live_spec(request.spec, override)
    socket = paths.engine_dir(instance) / "engine.sock"
    argv = [request.engine_path, "--model", spec.model]
    if request.context is None:
        argv += ["--host", f"{spec.host},{socket}", "--port", str(spec.port)]
    else:
        argv += ["--host", str(socket)]
    if spec.n_ctx != AUTO:
        argv += ["--ctx-size", str(spec.n_ctx)]
    argv += ["--parallel", str(spec.n_seq)]
    if spec.kv_unified is not None:
        argv.append("--kv-unified" if spec.kv_unified else "--no-kv-unified")
    argv += ["--instance-id", instance, "--admin-private", "--metrics"]
    if _PAGES_OPTION not in map(option_name, spec.extra_args):
        argv += [_PAGES_OPTION, f"{paths.pages}/"]
    if keys is not None:
        argv += ["--api-key-file", str(keys)]
    if quiet:
        argv.append(QUIET)
    return [*argv, *spec.extra_args]


def pages_dir(request: UpRequest, paths: Paths) -> Path:
    """Return where this engine writes pages and slots to files: the last place that it is told."""
    chosen, args = paths.pages, request.spec.extra_args
    for arg, value in pairwise(args):
        if option_name(arg) == _PAGES_OPTION:
            chosen = Path("" if request.context is None else request.context.cwd, value)
    return chosen


def engine_env(
    env: Mapping[str, str],
    context: ProcessContext | None = None,
    secrets: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the engine's environment: ours, without what sets an option that we set ourselves.

    One that aborts has no debugger print its stack: that would be longer than the last lines that
    are kept, and they are to say why. With a `context`, everything that a caller could have said
    is the caller's, his `secrets` too.
    """
    whole = whole_env(env, context, secrets)
    return {name: value for name, value in whole.items() if name not in OWNED_ENV} | _ADDED_ENV


def whole_env(
    env: Mapping[str, str],
    context: ProcessContext | None,
    secrets: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the same with what sets an option: what a caller's command line is read with."""
    if context is None:
        return dict(env)
    others = {name: value for name, value in env.items() if not callers(name)}
    return others | context.env | (dict(secrets) if secrets else {})


def callers(name: str) -> bool:
    """Whether an engine of `llamactl run` has this variable from its caller alone."""
    return name.startswith(_CALLERS_PREFIXES) or name in _CALLERS_NAMES


def holder_order(
    argv: list[str],
    env: Mapping[str, str],
    instance: str,
    paths: Paths,
    settings: Settings,
    context: ProcessContext | None = None,
) -> dict[str, Any]:
    """Return what the holder reads from its standard input (see `holder.py`)."""
    own = None if context is None else context.model_dump(exclude={"env", "secrets"})
    return {
        "instance_id": instance,
        "directory": str(paths.engine_dir(instance)),
        "argv": argv,
        "env": engine_env(env),
        "context": own,
        "log": str(paths.engine_log),
        "log_bytes_max": settings.log_bytes_max,
        "log_files_max": settings.log_files_max,
        "last_lines_max": LAST_LINES_MAX,
        "oom_score_add": ENGINE_OOM_SCORE_ADD,
    }
