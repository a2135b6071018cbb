"""`llamactl serve`: the daemon in the foreground, for a service manager or a terminal."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llamactl_cli.provide import unnamed_engine


class LogFormat(StrEnum):
    """How a line of the daemon's log is written."""

    TEXT = "text"
    JSON = "json"


def serve(
    ctx: typer.Context,
    no_resume: Annotated[
        bool,
        typer.Option("--no-resume", help="Do not start the configured engine, or the last one."),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Instead of LLAMACTL_CONFIG and the usual."),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Apply the configuration file as it changes, by a relaunch if need be."
        ),
    ] = False,
    log_format: Annotated[
        LogFormat, typer.Option("--log-format", help="Lines for people, or JSON.")
    ] = LogFormat.TEXT,
) -> None:
    """Run the daemon in the foreground. It becomes this process; its log goes to stderr.

    With a model in the configuration it brings that engine up. SIGHUP is `llamactl reload`.
    """
    argv = [sys.executable, "-P", "-m", "llamactl_supervisor", "serve"]
    argv += ["--log-format", LogFormat.JSON if ctx.obj.as_json else log_format]
    argv += ["--no-resume"] if no_resume else []
    argv += ["--watch"] if watch else []
    argv += [] if config is None else ["--config", str(config)]
    argv += _built(config)
    os.execv(argv[0], argv)


def _built(file: Path | None) -> list[str]:
    from llamactl_supervisor.config import load
    from llamactl_supervisor.errors import LlamactlError

    try:
        path = unnamed_engine(load(file=file))
    except LlamactlError:
        return []  # the daemon says so
    return ["--built", path] if path else []
