"""Whether an engine can be started at all, asked before another one is stopped for it.

Nothing is loaded: the model's first bytes are read, the keys too, and the engine is run with
`--print-args-json`, which parses its command line and exits.
"""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import keys, launch
from llamactl_supervisor.errors import Code, LlamactlError, error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.models import Override, UpRequest
    from llamactl_supervisor.paths import Paths

log = logging.getLogger("llamactl.preflight")

PARSE_S = 5.0
"""How long the engine may take over its command line; a patched one takes some hundredths."""
LINES_MAX = 20
"""Lines of what it says against it that are kept."""
_ASK = "--print-args-json"
_MAGIC = b"GGUF"


def check(
    request: UpRequest, override: Override | None, paths: Paths, env: Mapping[str, str]
) -> None:
    """Raise why this engine could not be started; takes `PARSE_S` seconds at most.

    `engine_spawn_failed` for the binary, the model and the command line, `invalid_request` for the
    key file. What an engine that does not know `--print-args-json` makes of its command line is
    not asked.
    """
    _model(request.spec.model)
    users = request.spec.api_key_file
    if users is not None:
        keys.read(users)
    named = None if users is None else Path(users)
    _command_line(launch.engine_argv(request, override, "preflight", paths, named), env)


def refused(exc: LlamactlError) -> LlamactlError:
    """Return the error of a restart that would have ended a healthy engine for nothing."""
    return error(
        Code.RESTART_REFUSED,
        f"the engine runs on, for it could not be started again: {exc.message}",
        hint=exc.hint,
        details={**exc.details, "reason": exc.code},
    )


def _model(model: str) -> None:
    try:
        # Not blocking: what was a file when it was asked for may be a pipe now.
        fd = os.open(model, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as exc:
        what = f"cannot be read: {exc.strerror or exc}"
    else:
        if magic == _MAGIC:
            return
        what = "is no GGUF file"
    raise error(
        Code.ENGINE_SPAWN_FAILED,
        f"the model {model} {what}",
        hint="put it back, or name another with `llamactl up --model`",
        details={"model": model},
    )


def _command_line(argv: list[str], env: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            [argv[0], _ASK, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=launch.engine_env(env),
            start_new_session=True,
            timeout=PARSE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        log.warning("%s %s has not ended within %g s: not judged", argv[0], _ASK, PARSE_S)
        return
    except OSError as exc:
        raise _unrunnable(argv[0], exc.strerror or str(exc)) from exc
    said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    if done.returncode == 0 or any(f"invalid argument: {_ASK}" in line for line in said):
        return
    first = said[0] if said else f"it ended with status {done.returncode}"
    raise error(
        Code.ENGINE_SPAWN_FAILED,
        f"the engine does not take its command line: {first}",
        hint="see the options after `--` of `llamactl up`, or engine.extra_args",
        details={"exit_status": done.returncode, "last_lines": said[:LINES_MAX]},
    )


def _unrunnable(path: str, why: str) -> LlamactlError:
    return error(
        Code.ENGINE_SPAWN_FAILED,
        f"{path} could not be run: {why}",
        hint="build the engine with `llamactl build`",
        details={"engine_path": path},
    )
