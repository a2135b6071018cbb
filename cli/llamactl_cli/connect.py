"""The way to the daemon, which a broken configuration file does not block."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamactl_supervisor.client import ControlClient
    from llamactl_supervisor.config import Paths

    from llamactl_cli.output import Output


def connect(output: Output) -> ControlClient:
    """Return a client of the daemon of these directories."""
    from llamactl_supervisor.client import ControlClient

    return ControlClient(paths(output))


def paths(output: Output) -> Paths:
    """Return the directories, without those of a file that is broken; that is said on stderr."""
    from llamactl_supervisor.config import load_paths

    return load_paths(broken=lambda exc: output.say(f"the file is left out: {exc.message}"))
