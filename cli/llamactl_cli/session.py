"""Whether what is started here loses its socket when the caller logs out."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamactl_supervisor.config import Paths

SESSIONS = Path("/run/user")
LINGERING = Path("/var/lib/systemd/linger")


def ends_at_logout(paths: Paths, lingering: Path = LINGERING) -> str | None:
    """Return the user's name if systemd removes the runtime directory at the last logout."""
    inside = paths.runtime.is_relative_to(SESSIONS / str(os.getuid()))
    return None if not inside or lingers(lingering) else _name()


def lingers(lingering: Path = LINGERING) -> bool:
    """Return whether the user's systemd goes on after the last logout."""
    return (lingering / _name()).exists()


def _name() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
