"""`llamactl reap`: what a dead daemon left behind, cleared away."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def reap(
    ctx: typer.Context,
    unit: Annotated[
        str | None,
        typer.Option(
            "--unit", metavar="NAME", help="The systemd unit whose ExecStopPost= this is."
        ),
    ] = None,
    user: Annotated[
        bool, typer.Option("--user", help="It is a unit of the user's systemd.")
    ] = False,
) -> None:
    """Clear away what a dead daemon left: sockets, directories, an engine it was to stop.

    An engine that was not to be stopped (its daemon crashed, or handed it over) is left to the
    next daemon. Needs no daemon, and is refused while there is one (exit 5). With --json: the pids
    of engines that were ended and that were left, and the paths that were removed.
    """
    argv = [sys.executable, "-P", "-m", "llamactl_supervisor", "reap"]
    if ctx.obj.as_json:
        sys.stdout.write("")  # raises where it is closed, which cannot be seen from what follows
        argv += ["--log-format", "json"]
    argv += [] if unit is None else ["--unit", unit]
    os.execv(argv[0], [*argv, *(["--user"] if user else [])])
