"""The systemd units of `units/`, filled in for one user of one machine."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.config import Paths

TEMPLATES = Path(__file__).with_name("units")
SERVICE, SOCKET = "llamactl.service", "llamactl.socket"
RUN_AS = "20-run-as.conf"
DROP_INS = {True: "10-gpu.conf", False: "10-cpu.conf"}
NAMES = (
    *(SOCKET, SERVICE, f"{SOCKET}.d/{RUN_AS}", f"{SERVICE}.d/{RUN_AS}"),
    *(f"{SERVICE}.d/{name}" for name in DROP_INS.values()),
)
"""Every file that there can be."""
NOTIFY_RELOAD_SINCE = 253
"""The systemd that knows Type=notify-reload."""


@dataclass(frozen=True)
class Scope:
    """Whose systemd the units are for; the three directories as a unit names them."""

    directory: Path
    runtime: str
    state: str
    cache: str
    run_as: str | None = None
    """The user of a system service; None: the units are a user's own."""

    @classmethod
    def system(cls, run_as: str) -> Scope:
        """Return the machine's."""
        units = Path("/etc/systemd/system")
        return cls(units, "%t/llamactl", "%S/llamactl", "%C/llamactl", run_as)

    @classmethod
    def user(cls, paths: Paths, env: Mapping[str, str]) -> Scope:
        """Return the caller's own; it works in the directories that the caller's commands use."""
        config = Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        chosen = env.get("LLAMACTL_RUNTIME_DIR")
        runtime = plain(str(paths.runtime)) if chosen else "%t/llamactl"
        state, cache = plain(str(paths.state)), plain(str(paths.cache))
        return cls(config / "systemd" / "user", runtime, state, cache)

    @property
    def systemctl(self) -> tuple[str, ...]:
        """The command that talks to that systemd."""
        return ("systemctl", "--user") if self.run_as is None else ("systemctl",)


def render(scope: Scope, version: int, *, gpu: bool) -> dict[Path, str]:
    """Return the text of every file by its path, for the systemd of that version.

    Raises `invalid_request` for what cannot be written into a unit.
    """
    values = {
        "TYPE": "notify-reload" if version >= NOTIFY_RELOAD_SINCE else "notify",
        "LLAMACTL": " ".join(map(exec_word, program())),
        "REAP": " --user" if scope.run_as is None else "",
        "RUNTIME": scope.runtime,
        "STATE": scope.state,
        "CACHE": scope.cache,
        "TARGET": "default.target" if scope.run_as is None else "multi-user.target",
        "USER": plain(scope.run_as or ""),
    }
    hardening = DROP_INS[gpu]
    templates = {SOCKET: SOCKET, SERVICE: SERVICE}
    if scope.run_as is None:
        templates[f"{SERVICE}.d/{hardening}"] = f"user/{hardening}"
    else:
        templates[f"{SERVICE}.d/{hardening}"] = f"system/{hardening}"
        templates[f"{SERVICE}.d/{RUN_AS}"] = "system/20-run-as.service.conf"
        templates[f"{SOCKET}.d/{RUN_AS}"] = "system/20-run-as.socket.conf"
    return {
        scope.directory / name: _filled((TEMPLATES / template).read_text(), values)
        for name, template in templates.items()
    }


def program() -> tuple[str, ...]:
    """Return the words that run this very llamactl, by absolute paths."""
    beside = Path(sys.executable).with_name("llamactl")
    if os.access(beside, os.X_OK):
        return (str(beside),)
    return (sys.executable, "-P", "-m", "llamactl_cli")


def plain(text: str) -> str:
    """Return `text` with nothing in it that systemd would take for a specifier."""
    if not text.isprintable() or set(text) & set('"\\'):
        message = f"{text!r} cannot be written into a systemd unit"
        raise InvalidRequestError("invalid_request", message, hint="choose another path")
    return text.replace("%", "%%")


def exec_word(text: str) -> str:
    """Return `text` as one word of an Exec line."""
    return f'"{plain(text)}"'.replace("$", "$$") if re.search(r"[\s';$]", text) else plain(text)


def _filled(template: str, values: Mapping[str, str]) -> str:
    return re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], template)
