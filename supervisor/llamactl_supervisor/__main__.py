"""`python -m llamactl_supervisor serve`: the daemon in the foreground; `reap`: after one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamactl_supervisor.config import (
    left_out_message,
    load,
    load_paths,
    load_settings,
    mistyped,
    mistyped_message,
)
from llamactl_supervisor.errors import ExitCode, LlamactlError, error
from llamactl_supervisor.fields import OWNED_ENV, unheard_message
from llamactl_supervisor.models import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

DISTRIBUTION = "llamactl-sidecar"


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = f"{stamp} {record.levelname.lower()} {record.name} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(exc := record.__dict__.get("refused"), LlamactlError):
            problem = {"code": exc.code, "message": exc.message, "hint": exc.hint}
            fields["error"] = problem | {"details": exc.details}
        if (trouble := record.__dict__.get("trouble")) is not None:
            fields["error"] = trouble
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def main() -> int:
    """Serve, reap or describe, and return the process's exit code."""
    arguments = _parser().parse_args()
    os.umask(0o077)
    if arguments.problem_fd is not None:
        os.set_inheritable(arguments.problem_fd, False)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if arguments.log_format == "json" else _Text())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("httpx", "httpcore", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        work: Callable[[argparse.Namespace], ExitCode] = arguments.work
        return work(arguments)
    except LlamactlError as exc:
        hint = f" ({exc.hint})" if exc.hint else ""
        logging.getLogger("llamactl").error(
            "%s: %s%s", exc.code, exc.message, hint, extra={"refused": exc}
        )
        if arguments.problem_fd is not None:
            with contextlib.suppress(BrokenPipeError):  # who would read it has gone
                os.write(arguments.problem_fd, Problem.of(exc).model_dump_json().encode())
        return exc.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llamactl-supervisor")
    parser.set_defaults(problem_fd=None)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, metavar="FILE", help="instead of the usual files")
    common.add_argument("--log-format", choices=("text", "json"), default="text")
    commands = parser.add_subparsers(required=True)
    published = commands.add_parser("describe", help="print what is published about the daemon")
    published.add_argument("what", choices=("openapi", "api", "metrics"))
    published.set_defaults(work=_describe, log_format="text")
    serve = commands.add_parser("serve", parents=[common], help="run the daemon")
    serve.add_argument(
        "--no-resume",
        action="store_true",
        help="wait for a request instead of loading the configured engine or the last one",
    )
    serve.add_argument(
        "--watch", action="store_true", help="follow the configuration file as it changes"
    )
    serve.add_argument(
        "--built", metavar="PATH", help="the llama-server to run where nothing else names one"
    )
    serve.add_argument(
        "--problem-fd",
        type=int,
        metavar="FD",
        help="write to this descriptor, as JSON, why the daemon could not go on",
    )
    serve.set_defaults(work=_serve)
    told = "clear away what a dead daemon left; with a log in JSON, its result on stdout as well"
    reap = commands.add_parser("reap", parents=[common], help=told)
    reap.add_argument("--unit", metavar="NAME", help="the systemd unit that is being stopped")
    reap.add_argument("--user", action="store_true", help="of the user's own systemd")
    reap.set_defaults(work=_reap)
    return parser


def _describe(arguments: argparse.Namespace) -> ExitCode:
    from llamactl_supervisor import describe

    sys.stdout.write(getattr(describe, arguments.what)())
    return ExitCode.OK


def _serve(arguments: argparse.Namespace) -> ExitCode:
    from llamactl_supervisor.daemon import Daemon

    loaded = load(file=arguments.config)
    for name, nearest in mistyped(loaded.env).items():
        logging.getLogger("llamactl").warning("environment: %s", mistyped_message(name, nearest))
    if loaded.left_out:
        logging.getLogger("llamactl").warning("%s", left_out_message(loaded))
    for name in sorted(OWNED_ENV & loaded.env.keys()):
        logging.getLogger("llamactl").warning("environment: %s", unheard_message(name))
    daemon = Daemon(loaded, _version(), watch=arguments.watch, built=arguments.built)
    return asyncio.run(daemon.run(resume=not arguments.no_resume))


def _reap(arguments: argparse.Namespace) -> ExitCode:
    from llamactl_supervisor.reap import reap, stop_is_asked

    unit: str | None = arguments.unit
    stopping = unit is not None and stop_is_asked(unit, arguments.user, os.environ)

    def broken(exc: LlamactlError) -> None:
        logging.getLogger("llamactl").error("%s: left out: %s", exc.code, exc.message)

    paths = load_paths(file=arguments.config, broken=broken)
    reaped = reap(paths, load_settings(file=arguments.config, broken=broken), stopping)
    if arguments.log_format == "json":
        try:
            os.write(sys.stdout.fileno(), json.dumps(asdict(reaped)).encode() + b"\n")
        except OSError as exc:
            raise error("os_error", f"stdout: {exc.strerror}: the result is {reaped}") from exc
    return ExitCode.OK


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"


if __name__ == "__main__":
    sys.exit(main())
