"""A `llamactl.socket` that is installed for these directories and not started: a daemon behind it
has a control group of its own, and does not end with the session of whoever typed `up`."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamactl_supervisor.config import Paths

    from llamactl_cli.output import Output

SYSTEMD = Path("/run/systemd/system")
"""It exists where systemd is what booted, sd_booted(3)."""
ANSWER_S = 10.0
SCOPES = (("systemctl", "--user"), ("systemctl",))
SHOW = ("show", "llamactl.socket", "llamactl.service", "--property=ActiveState,Listen,Environment")
START = ("--no-ask-password", "start", "llamactl.socket")


def start_socket(paths: Paths, output: Output) -> bool:
    """Start the caller's or the machine's socket, if it is ours; return whether it listens now."""
    if not SYSTEMD.is_dir():
        return False
    for systemctl in SCOPES:
        if _is_ours(paths, _said(*systemctl, *SHOW)):
            command = shlex.join((*systemctl, *START))
            if _said(*systemctl, *START) is not None:
                output.say(f"systemd listens for it: {command}")
                return True
            output.say(f"llamactl.socket is installed and could not be started: {command}")
    return False


def _is_ours(paths: Paths, shown: str | None) -> bool:
    """Say whether the units are of these directories, and the socket waits to be started."""
    lines = [] if shown is None else shown.splitlines()
    socket = set(lines[: lines.index("")] if "" in lines else [])
    environment = [line.partition("=")[2] for line in lines if line.startswith("Environment=")]
    return (
        f"Listen={paths.control_socket} (Stream)" in socket
        and not socket.isdisjoint({"ActiveState=inactive", "ActiveState=failed"})
        and f"LLAMACTL_STATE_DIR={paths.state}" in shlex.split(" ".join(environment))
    )


def _said(*command: str) -> str | None:
    """Return what the command says; None where it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
