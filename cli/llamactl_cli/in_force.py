"""Where a daemon that runs goes by other values than a configuration that is read now, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl_supervisor.models import Takes

from llamactl_cli import text

if TYPE_CHECKING:
    from llamactl_supervisor.config import Loaded
    from llamactl_supervisor.models import ConfigValue, RunningConfig

ENV = "env "
PINS = {"env": "variable", "flag": "flag"}
VALUE_COLUMNS_MIN = 12
BY_REQUEST = "asked for by `up` or `reconfigure`"
AT_RESTART = "until `llamactl restart`"
HOW = {
    Takes.RELOAD: "until `llamactl reload`",
    Takes.ENGINE_RESTART: "until `llamactl reload`, then `restart`",
    Takes.DAEMON_RESTART: "until the daemon is restarted",
}


@dataclass(frozen=True)
class Other:
    """What the daemon goes by instead, and until when or by whom."""

    running: Any
    why: str


def differing(loaded: Loaded, daemon: RunningConfig) -> dict[str, Other]:
    """Return, by key, what is not in force as it was `loaded` here."""
    found = {}
    for key, value in loaded.values.items():
        here = json.loads(json.dumps(value.value))  # as it comes over the wire
        there = daemon.values.get(key)
        if there is not None and there.running != here:
            found[key] = Other(there.running, _why(here, value.source, there))
    return found


def told(loaded: Loaded, daemon: RunningConfig | None) -> str:
    """Return what a daemon goes by, as a person reads it below the values of this shell."""
    from llamactl_supervisor.config import left_out_message

    if loaded.left_out:
        return f"{left_out_message(loaded)}\n{_told(loaded, daemon)}"
    return _told(loaded, daemon)


def _told(loaded: Loaded, daemon: RunningConfig | None) -> str:
    if daemon is None:
        return "no daemon answers: a new one would go by these"
    others = differing(loaded, daemon)
    if not others:
        return f"the daemon (pid {daemon.pid}) goes by the same"
    taken = max(len(key) + len(other.why) for key, other in others.items())
    width = max(VALUE_COLUMNS_MIN, text.SCREEN_COLUMNS - taken - 2 * len(text.COLUMN_GAP))
    rows = [
        (key, text.middle(text.printable(text.value(other.running)), width), other.why)
        for key, other in others.items()
    ]
    head = f"the daemon (pid {daemon.pid}) goes by these instead:"
    return f"{head}\n\n{text.columns(('KEY', 'RUNNING', 'WHY'), rows)}"


def _why(here: Any, source: str, there: ConfigValue) -> str:
    if there.read == here:
        return AT_RESTART if there.after_restart == here else BY_REQUEST
    if there.pinned is not None:
        return f"by the daemon's own {PINS[there.pinned.split()[0]]}"
    return "set in this shell alone" if source.startswith(ENV) else HOW[there.takes]
