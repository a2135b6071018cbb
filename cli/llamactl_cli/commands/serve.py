"""`llamactl serve`: the daemon in the foreground, for a service manager or a terminal."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def serve(
    no_resume: Annotated[
        bool,
        typer.Option("--no-resume", help="Do not start the engine that was last asked for."),
    ] = False,
) -> None:
    """Run the daemon in the foreground. It becomes this process; its log goes to stderr."""
    argv = [sys.executable, "-P", "-m", "llamactl_supervisor", "serve"]
    os.execv(argv[0], [*argv, *(["--no-resume"] if no_resume else [])])
