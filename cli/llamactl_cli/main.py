"""The entry point: runs a command and maps every error to one report and an exit code."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, ExitCode, LlamactlError, error

from llamactl_cli.output import JSON_FLAG, Output, stand_in

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMAND = "llamactl"
COMPLETE = "_LLAMACTL_COMPLETE"
"""Set by the script of `llamactl completion` when a shell asks for completions."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    stand_in()
    words, as_json = split_json(sys.argv[1:] if argv is None else argv)
    output = Output(as_json=as_json)
    try:
        return program(words or ["--help"], output)
    except LlamactlError as exc:
        output.fail(exc)
        return exc.exit_code
    except OSError as exc:
        what = exc.strerror or str(exc)
        message = what if exc.filename is None else f"{exc.filename}: {what}"
        output.fail(error("os_error", message))
        return ExitCode.FAILED
    except KeyboardInterrupt:
        output.fail(error("interrupted", "interrupted"))
        return ExitCode.INTERRUPTED


def program(words: list[str], output: Output) -> int:
    """Run the command and return its exit code; every failure is an exception."""
    # Not at the top: an interrupt while the parser is imported is one like any other.
    import typer

    from llamactl_cli.app import application

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
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return code or ExitCode.OK


def split_json(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Take `--json` out, wherever it stands before a `--`; return the rest and if it was there.

    Every command has it, and an error of the parser is JSON as well: it must be known before.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words = [word for word in argv[:end] if word != JSON_FLAG]
    return [*words, *argv[end:]], len(words) < end
