"""Whether an engine can be started at all, asked before another one is stopped for it.

Nothing is loaded: samples of the model are read, the keys too, and the engine says what it takes
its command line for. Every function here takes a while; call it in a thread.
"""

from __future__ import annotations

import logging
import os
from errno import ENOENT
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import args, caller_secrets, fingerprint, keys, launch, spec
from llamactl_supervisor.errors import Code, LlamactlError, error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.models import Override, UpRequest
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.spec import EngineSpec

log = logging.getLogger("llamactl.preflight")

_MAGIC = b"GGUF"
_NO_VERDICT = frozenset({Code.NOT_SUPPORTED, Code.TIMED_OUT, Code.NO_FILE, Code.NO_ACCESS})
"""Nothing that the engine would not find out, and tell, itself."""


def check(
    request: UpRequest, override: Override | None, paths: Paths, env: Mapping[str, str]
) -> EngineSpec | None:
    """Return what this engine is asked to be, or raise why it could not be started.

    `file_unreadable` for what may yet come (a mount that is late, say), `engine_spawn_failed` for
    the binary, the model and the command line, `invalid_request` for the key file. None: the
    engine does not say what it takes its command line for, and is started as it is.
    """
    try:
        return asked(request, override, paths, env)
    except LlamactlError as exc:
        if exc.code not in _NO_VERDICT:
            raise
        log.warning("%s: not judged", exc.message)
        return None


def asked(
    request: UpRequest, override: Override | None, paths: Paths, env: Mapping[str, str]
) -> EngineSpec:
    """Return what this engine is asked to be.

    Raises what `check` raises; besides what `args.ask` raises, and `fingerprint.of` for a file
    that cannot be read.
    """
    files(request)
    cwd, context = directory(request), request.context
    answer = args.ask(argv(request, override, paths), environment(request, paths, env), cwd)
    spec.require_file(answer)
    for option, value in spec.loaded_files(answer):
        missing = fingerprint.missing(value, cwd)
        if missing is not None:
            raise _unreadable(f"file of {option}", missing, OSError(ENOENT, os.strerror(ENOENT)))
    users = request.spec.api_key_file
    read = [request.spec.model, *([] if users is None else [users]), *spec.named_files(answer)]
    contents = {value: fingerprint.named(value, cwd) for value in read}
    options = {f"env {option.env}" for option in answer.options}
    words = {} if context is None else context.words()
    return spec.engine_spec(
        answer,
        request.spec,
        build_content=fingerprint.of(Path(request.engine_path)),
        files={value: found for value, found in contents.items() if found is not None},
        context={name: word for name, word in words.items() if name not in options},
    )


def can_be_quiet(
    request: UpRequest, override: Override | None, paths: Paths, env: Mapping[str, str]
) -> bool:
    """Say whether this engine can be started so that requests wait until it is told otherwise."""
    try:
        heard = environment(request, paths, env)
        args.ask([*argv(request, override, paths), launch.QUIET], heard, directory(request))
    except LlamactlError:
        return False
    return True


def directory(request: UpRequest) -> Path:
    """Return where relative paths of the command line begin."""
    return Path.cwd() if request.context is None else Path(request.context.cwd)


def environment(request: UpRequest, paths: Paths, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this engine, secrets included, where `env` is ours."""
    context = request.context
    return launch.engine_env(env, context, caller_secrets.read(paths, context))


def argv(request: UpRequest, override: Override | None, paths: Paths) -> list[str]:
    """Return the command line that is asked about."""
    users = request.spec.api_key_file
    named = None if users is None else Path(users)
    return launch.engine_argv(request, override, "preflight", paths, named)


def refused(exc: LlamactlError) -> LlamactlError:
    """Return the error of a restart that would have ended a healthy engine for nothing."""
    return error(
        Code.RESTART_REFUSED,
        f"the engine runs on, for it could not be started again: {exc.message}",
        hint=exc.hint,
        details={**exc.details, "reason": exc.code},
    )


def apply_refused(exc: LlamactlError) -> LlamactlError:
    """Return the error of an apply of what is no engine: nothing was changed."""
    return error(
        Code.APPLY_REFUSED,
        f"nothing was changed: {exc.message}",
        hint=exc.hint,
        details={**exc.details, "reason": exc.code},
    )


def check_model(model: str) -> None:
    """Raise why the file cannot be read, or is no GGUF file."""
    if _head("model", model) != _MAGIC:
        raise error(
            Code.ENGINE_SPAWN_FAILED,
            f"the model {model} is no GGUF file",
            hint="put it back, or name another file",
            details={"file": model},
        )


def files(request: UpRequest) -> None:
    """Raise what is wrong with the files that the engine needs, as `check` does."""
    users = request.spec.api_key_file
    check_model(request.spec.model)
    if users is not None:
        _head("API key file", users)
        keys.read(users)
    try:
        Path(request.engine_path).stat()
    except OSError as exc:
        raise _unreadable("llama-server", request.engine_path, exc) from exc


def _head(what: str, path: str) -> bytes:
    try:
        # Not blocking: what was a file when it was asked for may be a pipe now.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            return file.read(len(_MAGIC)) or b""
    except OSError as exc:
        raise _unreadable(what, path, exc) from exc


def _unreadable(what: str, path: str, exc: OSError) -> LlamactlError:
    return error(
        Code.FILE_UNREADABLE,
        f"the {what} {path} cannot be read: {exc.strerror or exc}",
        hint="put it back, or name another file",
        details={"file": path},
    )
