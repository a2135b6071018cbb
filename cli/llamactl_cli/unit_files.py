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

    from llamactl_supervisor.config import Loaded

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
RESTART_KILL_SIGNAL_SINCE = 244
"""The systemd that knows RestartKillSignal=."""


@dataclass(frozen=True)
class Scope:
    """Whose systemd the units are for; the three directories as a unit names them."""

    directory: Path
    runtime: str
    state: str
    cache: str
    config: str | None
    """The file that LLAMACTL_CONFIG names, if it does."""
    run_as: str | None = None
    """The user of a system service; None: the units are a user's own."""

    @classmethod
    def system(cls, run_as: str, env: Mapping[str, str]) -> Scope:
        """Return the machine's."""
        units = Path("/etc/systemd/system")
        where = ("%t/llamactl", "%S/llamactl", "%C/llamactl", _config(env))
        return cls(units, *where, run_as)

    @classmethod
    def user(cls, loaded: Loaded) -> Scope:
        """Return the caller's own; it works in the directories that the caller's commands use."""
        env, paths = loaded.env, loaded.paths
        home = Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        default = loaded.values["paths.runtime_dir"].is_default
        runtime = "%t/llamactl" if default else plain(str(paths.runtime))
        state, cache = plain(str(paths.state)), plain(str(paths.cache))
        return cls(home / "systemd" / "user", runtime, state, cache, _config(env))

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
        "CONFIG": "" if scope.config is None else f' "LLAMACTL_CONFIG={scope.config}"',
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


def _config(env: Mapping[str, str]) -> str | None:
    named = env.get("LLAMACTL_CONFIG")
    return plain(str(Path(named).absolute())) if named else None


def _filled(template: str, values: Mapping[str, str]) -> str:
    return re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], template)
