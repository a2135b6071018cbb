"""The command line and environment of an engine, and the order that its holder is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

from llamactl_supervisor.fields import option_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from llamactl_supervisor.models import EngineRequest, Override, UpRequest
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.settings import Settings

ENGINE_OOM_SCORE_ADD = 200
"""Raised so that the kernel, short of memory, takes the engine and not the daemon."""
LAST_LINES_MAX = 60
"""Lines of output kept in RAM for the exit record."""

_PAGES_OPTION = "--slot-save-path"
_REFUSED_ENV = ("LLAMA_ARG_REUSE_PORT",)
"""With it two engines could answer one port."""


def instance_id(seed: UUID, generation: int) -> str:
    """Return the name of the engine process `generation`; `seed` is drawn once per daemon."""
    return uuid5(seed, str(generation)).hex


def live_spec(spec: EngineRequest, override: Override | None) -> EngineRequest:
    """Return `spec` with the geometry that was last set live, if any."""
    if override is None:
        return spec
    geometry = {"n_ctx": override.n_ctx, "n_seq": override.n_seq, "kv_unified": override.kv_unified}
    return spec.model_copy(update=geometry)


def engine_argv(
    request: UpRequest,
    override: Override | None,
    instance: str,
    paths: Paths,
    keys: Path | None = None,
) -> list[str]:
    """Return the engine's whole command line. No secret is ever part of it.

    `keys` is the file with the user's API keys and ours, where the engine is to ask for one.
    """
    spec = live_spec(request.spec, override)
    socket = paths.engine_dir(instance) / "engine.sock"
    argv = [request.engine_path, "--model", spec.model]
    argv += ["--host", f"{spec.host},{socket}", "--port", str(spec.port)]
    argv += ["--ctx-size", str(spec.n_ctx), "--parallel", str(spec.n_seq)]
    if spec.kv_unified is not None:
        argv.append("--kv-unified" if spec.kv_unified else "--no-kv-unified")
    argv += ["--instance-id", instance, "--admin-private", "--metrics"]
    if _PAGES_OPTION not in map(option_name, spec.extra_args):
        argv += [_PAGES_OPTION, f"{paths.pages}/"]
    if keys is not None:
        argv += ["--api-key-file", str(keys)]
    return [*argv, *spec.extra_args]


def engine_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the engine's environment: ours, without what it must not hear."""
    return {name: value for name, value in env.items() if name not in _REFUSED_ENV}


def holder_order(
    argv: list[str], env: Mapping[str, str], instance: str, paths: Paths, settings: Settings
) -> dict[str, Any]:
    """Return what the holder reads from its standard input (see `holder.py`)."""
    return {
        "instance_id": instance,
        "directory": str(paths.engine_dir(instance)),
        "argv": argv,
        "env": engine_env(env),
        "log": str(paths.engine_log),
        "log_bytes_max": settings.log_bytes_max,
        "log_files_max": settings.log_files_max,
        "last_lines_max": LAST_LINES_MAX,
        "oom_score_add": ENGINE_OOM_SCORE_ADD,
    }
