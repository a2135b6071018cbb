"""Asks llama-server what its command line means and would take. Nothing is loaded.

Every function here waits for a process; call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.option_table import ArgsAnswer, MemoryAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llamactl_supervisor.option_table import Option

PARSE_S = 5.0
"""How long the engine may take over its command line; a patched one takes some hundredths."""
DEVICES_S = 30.0
"""How long it may take over its devices; drivers may have to be loaded."""
MEASURE_S = 60.0
"""How long it may take over the model's metadata, which may come from a slow disk."""
ANSWER_BYTES_MAX = 4 * 2**20
"""Most that is read of what it says; a patched one says some 60 kB."""
LINES_MAX = 20
"""Lines of what it says against its command line that are kept."""
_SHORT = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Why a process cannot be started though nothing is wrong with its program."""
TABLES_MAX = 16
"""Option tables and device lists kept, of so many binaries."""
_ARGS, _MEMORY = "--print-args-json", "--print-memory-json"
_DEVICE = re.compile(r"^ +\S+: .*\([1-9][0-9]* MiB", re.MULTILINE)
"""A device as it is listed; one that only computes has no memory of its own."""
_OURS = "`llamactl build` prints the path of llamactl's own"
_BYTES = re.compile(r"\b([0-9]{7,18})(?: bytes|(?= are available))")
_LOGGED = re.compile(r"[0-9.]+ E (?:\S+ +)?\S+: (.+)")
_Answer = TypeVar("_Answer", ArgsAnswer, MemoryAnswer)
_Kept = TypeVar("_Kept")
_tables: dict[object, list[Option]] = {}
_devices: dict[object, bool] = {}


def ask(argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> ArgsAnswer:
    """Return what the engine `argv[0]` takes its arguments for, in this environment.

    Raises `engine_spawn_failed` for a binary that cannot be run and for arguments that it does not
    take (in its words), `out_of_resources` where no process can be started now, `not_supported` for
    an engine that does not know the question, `timed_out` after `PARSE_S` seconds, and
    `engine_answer_broken` for an answer that makes no sense.
    """
    return _ask(ArgsAnswer, _ARGS, PARSE_S, argv, env, cwd)


def memory(argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> MemoryAnswer:
    """Return what this engine would take; raises what `ask` raises, late after `MEASURE_S`."""
    return _ask(MemoryAnswer, _MEMORY, MEASURE_S, argv, env, cwd)


def options(engine_path: str, env: Mapping[str, str]) -> list[Option]:
    """Return the engine's options; asked once of each binary. Raises what `ask` raises."""
    return _once(_tables, _binary(engine_path), lambda: ask([engine_path], env).options)


def _binary(engine_path: str) -> tuple[int, ...]:
    """Return what another build in its place would have another of."""
    try:
        found = Path(engine_path).stat()
    except OSError as exc:
        raise _unrunnable(engine_path, exc) from exc
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _once(kept: dict[object, _Kept], key: object, find: Callable[[], _Kept]) -> _Kept:
    """Return what was found for this key before, or find it now; the oldest one is given up."""
    if key not in kept:
        found = find()
        while len(kept) >= TABLES_MAX:
            kept.pop(next(iter(kept)), None)
        kept[key] = found
    return kept[key]


def _ask(
    shape: type[_Answer],
    flag: str,
    within_s: float,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None,
) -> _Answer:
    command = [argv[0], flag, *argv[1:]]
    status, out, err = _run(command, env, cwd, within_s)
    said = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    if any(f"invalid argument: {flag}" in line for line in said):
        raise error(
            Code.NOT_SUPPORTED,
            f"{argv[0]} does not know {flag}: it is no engine of ours, or an old one",
            hint=_OURS,
            details={"engine_path": argv[0]},
        )
    if status != 0:
        why = _why(said) or f"it ended with status {status}"
        if flag == _MEMORY:
            what = "the engine would not load this"
            hint = "-c and -np say how much it is to hold" if _BYTES.search(why) else None
        else:
            what = "the engine does not take its command line"
            hint = f"{argv[0]} --help lists its options"
        raise error(
            Code.ENGINE_SPAWN_FAILED,
            f"{what}: {_BYTES.sub(_in_mib, why)}",
            hint=hint,
            details={"exit_status": status, "last_lines": said[:LINES_MAX]},
        )
    try:
        return shape.model_validate_json(out)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "answer"
        raise _broken(command, f"{where}: {first['msg']}", out) from None


def _why(said: list[str]) -> str | None:
    """Return what the engine says against itself: its last word as it logs, else its first."""
    logged = [found[1] for line in said if (found := _LOGGED.fullmatch(line))]
    return next(iter((*reversed(logged), *said)), None)


def _in_mib(n_bytes: re.Match[str]) -> str:
    return f"{int(n_bytes[1]) >> 20} MiB"


def _run(
    argv: list[str], env: Mapping[str, str], cwd: Path | None, within_s: float
) -> tuple[int, bytes, bytes]:
    """Return exit status, stdout and stderr; nothing of the process is left behind."""
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    except (OSError, ValueError) as exc:
        raise _unrunnable(argv[0], exc) from exc
    with child:
        try:
            out, err = _read(child, argv, within_s)
            return child.wait(), out, err
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)


def _read(child: subprocess.Popen[bytes], argv: list[str], within_s: float) -> tuple[bytes, bytes]:
    assert child.stdout is not None
    assert child.stderr is not None
    said: dict[int, bytearray] = {child.stdout.fileno(): bytearray()}
    said[child.stderr.fileno()] = bytearray()
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as open_ends:
        for fd in said:
            open_ends.register(fd, selectors.EVENT_READ)
        while open_ends.get_map():
            left_s = deadline - time.monotonic()
            ready = open_ends.select(left_s) if left_s > 0 else []
            if not ready:
                raise error(
                    Code.TIMED_OUT,
                    f"{argv[0]} {argv[1]} has not ended within {within_s:g} s",
                    hint="is it a llama-server?",
                )
            for key, _ in ready:
                chunk = os.read(key.fd, 2**16)
                said[key.fd] += chunk
                if not chunk:
                    open_ends.unregister(key.fd)
                elif len(said[key.fd]) > ANSWER_BYTES_MAX:
                    what = f"more than {ANSWER_BYTES_MAX} bytes"
                    raise _broken(argv, what, said[key.fd])
        # It has nothing more to say, and may live on.
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            what = f"{argv[0]} {argv[1]} was answered and has not ended within {within_s:g} s"
            raise error(Code.TIMED_OUT, what) from None
    out, err = said.values()
    return bytes(out), bytes(err)


def _broken(argv: Sequence[str], problem: str, answer: bytes | bytearray) -> LlamactlError:
    start = bytes(answer[:200]).decode(errors="replace")
    return error(
        Code.ENGINE_ANSWER_BROKEN,
        f"{argv[0]} {argv[1]} says what makes no sense: {problem}",
        hint=f"is it a llama-server? {_OURS}",
        details={"engine_path": argv[0], "body_start": start},
    )


def _unrunnable(path: str, exc: OSError | ValueError) -> LlamactlError:
    why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    if isinstance(exc, OSError) and exc.errno in _SHORT:
        return error(
            Code.OUT_OF_RESOURCES,
            f"{path} could not be run now: {why}",
            hint="raise the limits of open files and processes (LimitNOFILE=, TasksMax=), or free "
            "memory",
            details={"engine_path": path},
        )
    return error(
        Code.ENGINE_SPAWN_FAILED,
        f"{path} could not be run: {why}",
        hint=f"check the path; {_OURS}",
        details={"engine_path": path},
    )


def has_devices(engine_path: str, env: Mapping[str, str]) -> bool:
    """Whether the engine has a device that holds weights and is no processor.

    Asked once of each binary in each environment: to wake a device takes a while. False if the
    engine cannot say; it was asked for its arguments before, so it can be run.
    """

    def find() -> bool:
        _, out, _ = _run([engine_path, "--list-devices"], env, None, DEVICES_S)
        listed = out.decode(errors="replace").partition("Available devices:")[2]
        return _DEVICE.search(listed) is not None

    try:
        return _once(_devices, (_binary(engine_path), frozenset(env.items())), find)
    except LlamactlError:
        return False
