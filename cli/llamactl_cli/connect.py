"""The way to the daemon, which a broken configuration file does not block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamactl_supervisor.client import Client
    from llamactl_supervisor.config import Paths, Settings
    from llamactl_supervisor.errors import LlamactlError
    from llamactl_supervisor.models import DaemonStatus

    from llamactl_cli.output import Output


def connect(output: Output) -> Client:
    """Return a client of the daemon of these directories."""
    from llamactl_supervisor.client import Client

    return Client(paths(output))


def paths(output: Output) -> Paths:
    """Return the directories, without those of a file that is broken; that is said on stderr."""
    from llamactl_supervisor.config import load_paths

    return load_paths(broken=lambda exc: _left_out(output, exc))


def settings(output: Output) -> Settings:
    """Return [daemon]; of what is broken, environment and defaults, and that is said as well."""
    from llamactl_supervisor.config import load_settings

    return load_settings(broken=lambda exc: _left_out(output, exc))


def of_daemon(paths: Paths, daemon: DaemonStatus) -> Paths:
    """Return the directories that the daemon which answers at `paths` works in.

    Its state may be elsewhere: it had another environment or file. Which cache it has, it does not
    say and does not use.
    """
    return replace(paths, state=Path(daemon.log_dir).parent)


def _left_out(output: Output, exc: LlamactlError) -> None:
    output.say_once(f"this is left out: {exc.message}")
