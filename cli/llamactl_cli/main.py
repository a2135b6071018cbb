"""The entry point: runs a command and maps every error to one report and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, DaemonUnreachableError, ExitCode, LlamactlError, error

from llamactl_cli import without_daemon
from llamactl_cli.output import JSON_FLAG, Output, stand_in

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMAND = "llamactl"
INSTANCE_FLAG, INSTANCE_ENV = "--instance", "LLAMACTL_INSTANCE"
RUN = "run"
"""A program of its own behind a door of ours: no parser is imported for it."""
COMPLETE = "_LLAMACTL_COMPLETE"
"""Set by the script of `llamactl completion` when a shell asks for completions."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    stand_in()
    words, as_json = split_json(sys.argv[1:] if argv is None else argv)
    output = Output(as_json=as_json)
    try:
        return program(choose_instance(words) or ["--help"], output)
    except LlamactlError as exc:
        if isinstance(exc, DaemonUnreachableError):
            without_daemon.explain(exc)
        output.fail(exc)
        return exc.exit_code
    except OSError as exc:
        output.fail(_refused_by_the_system(exc))
        return ExitCode.FAILED
    except KeyboardInterrupt:
        output.fail(error("interrupted", "interrupted"))
        return ExitCode.INTERRUPTED


def _refused_by_the_system(exc: OSError) -> LlamactlError:
    """Return the error for what the system would not do."""
    what = exc.strerror or str(exc)
    if exc.filename is not None:
        return error("os_error", f"{exc.filename}: {what}")
    try:
        Path.cwd()
    except FileNotFoundError:
        return error(
            Code.WORKING_DIRECTORY_GONE,
            "the working directory is gone, and this needs one",
            hint="`cd` to a directory that is there",
        )
    return error("os_error", what)


def program(words: list[str], output: Output) -> int:
    """Run the command and return its exit code; every failure is an exception."""
    if words[0] == RUN:
        # llama-server dies of it until it serves, and so do we while we are being imported.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from llamactl_cli import shim

        return shim.main(words[1:])
    # Else pydantic reads the metadata of everything that is installed, to find plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Not at the top: an interrupt while the parser is imported is one like any other.
    import typer

    from llamactl_cli.app import application
    from llamactl_cli.interrupts import TOLD

    if COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        app = application(words[0])
        code = app(args=words, prog_name=COMMAND, standalone_mode=False, obj=output)
    except typer.TyperException as exc:
        where = getattr(getattr(exc, "ctx", None), "command_path", COMMAND)
        hint = f"`{where} --help` lists what it takes"
        raise error(Code.INVALID_REQUEST, exc.format_message(), hint=hint) from exc
    if code in TOLD:
        output.fail(error("interrupted", TOLD[code]))
    return code or ExitCode.OK


def choose_instance(words: list[str]) -> list[str]:
    """Take `--instance NAME` out from before the command, and work in its directories."""
    first, equals, name = words[0].partition("=") if words else ("", "", "")
    if first == INSTANCE_FLAG:
        name, words = (name, words[1:]) if equals else ((words[1:2] or [""])[0], words[2:])
    elif not (name := os.environ.get(INSTANCE_ENV, "")):
        return words
    from llamactl_cli.run.places import Places
    from llamactl_cli.run.words import UsageError, instance_name

    try:
        instance_name(name)
    except UsageError as exc:
        raise error(Code.INVALID_REQUEST, str(exc)) from None
    os.environ.update(Places(os.environ.copy(), name).daemon_env())
    os.environ.pop(INSTANCE_ENV, None)
    return words


def split_json(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Take `--json` out, wherever it stands before a `--`; return the rest and if it was there.

    Every command has it, and an error of the parser is JSON as well: it must be known before.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words = [word for word in argv[:end] if word != JSON_FLAG]
    return [*words, *argv[end:]], len(words) < end
