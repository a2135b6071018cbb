"""`python -m llamactl_supervisor serve`: the daemon in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from llamactl_supervisor import daemon_log, describe
from llamactl_supervisor.config import load
from llamactl_supervisor.daemon import Daemon
from llamactl_supervisor.errors import ExitCode, LlamactlError

DISTRIBUTION = "llamactl-sidecar"


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = f"{stamp} {record.levelname.lower()} {record.name} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def main() -> int:
    """Serve, and return the process's exit code."""
    parser = argparse.ArgumentParser(prog="llamactl-supervisor")
    commands = parser.add_subparsers(required=True, dest="command")
    published = commands.add_parser("describe", help="print what is published about the daemon")
    published.add_argument("what", choices=("openapi", "metrics"))
    serve = commands.add_parser("serve", help="run the daemon")
    serve.add_argument("--log-format", choices=("text", "json"), default="text")
    serve.add_argument("--config", type=Path, metavar="FILE", help="instead of the usual files")
    serve.add_argument(
        "--no-resume",
        action="store_true",
        help="wait for a request instead of loading the configured engine or the last one",
    )
    arguments = parser.parse_args()
    if arguments.command == "describe":
        sys.stdout.write(getattr(describe, arguments.what)())
        return ExitCode.OK
    os.umask(0o077)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if arguments.log_format == "json" else _Text())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("httpx", "httpcore", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        loaded = load(file=arguments.config)
        loaded.paths.create()
        settings = loaded.config.daemon
        daemon_log.rotate(loaded.paths.daemon_log, settings.log_bytes_max, settings.log_files_max)
        daemon = Daemon(loaded, _version())
        asyncio.run(daemon.run(resume=not arguments.no_resume))
    except LlamactlError as exc:
        hint = f" ({exc.hint})" if exc.hint else ""
        logging.getLogger("llamactl").error("%s: %s%s", exc.code, exc.message, hint)
        return exc.exit_code
    return ExitCode.OK


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"


if __name__ == "__main__":
    sys.exit(main())
