"""Where the daemon of this user and instance is, and whether one that we start would outlive us."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

INSTANCES = "instances"
_ENGINE_PATH = ("-P", "-m", "llamactl_builder", "engine-path")
SYSTEM_FILE = Path("/etc/llamactl/config.toml")
"""Read where the user has no file of his own; `config.py` of the supervisor has the rules."""
_SPAWN = """\
import sys
from llamactl_cli.output import Output
from llamactl_cli.unit_start import start_socket
from llamactl_supervisor.config import load_paths
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.spawn import spawn_daemon
try:
    if start_socket(load_paths(), Output(as_json=False)):
        sys.exit()
    if sys.argv[1]:
        sys.exit(sys.argv[1])
    spawn_daemon(load_paths())
except LlamactlError as exc:
    sys.exit(exc.message)
"""
"""Run apart: what it imports takes longer than all that the shim does where a daemon runs."""


class PlacesError(Exception):
    """There is no daemon, and none may or can be started."""


@dataclass(frozen=True)
class Places:
    """The daemon's directories; `instance` has its own below everybody's."""

    env: Mapping[str, str]
    instance: str | None = None

    @property
    def runtime(self) -> Path:
        """The directory of the control socket."""
        return self._below(self._chosen("runtime") or _default_runtime(self.env))

    @property
    def control_socket(self) -> str:
        """The daemon's socket."""
        return str(self.runtime / "control.sock")

    def daemon_env(self) -> dict[str, str]:
        """Return the environment of a daemon of this instance."""
        if self.instance is None:
            return dict(self.env)
        state = self._chosen("state") or _user_dir(self.env, "XDG_STATE_HOME", ".local/state")
        own = {"RUNTIME": self.runtime, "STATE": self._below(state)}
        return {
            **{name: text for name, text in self.env.items() if name != "LLAMACTL_INSTANCE"},
            **{f"LLAMACTL_{name}_DIR": str(path) for name, path in own.items()},
        }

    def _below(self, directory: Path) -> Path:
        return directory if self.instance is None else directory / INSTANCES / self.instance

    def _chosen(self, name: str) -> Path | None:
        """Return what the environment or the configuration file says of a directory."""
        if text := self.env.get(f"LLAMACTL_{name.upper()}_DIR"):
            return Path(text).absolute()
        file = _file(self.env)
        text = _paths_table(file).get(f"{name}_dir") if file is not None else None
        if not isinstance(text, str) or not text or file is None:
            return None
        if text == "~" or text.startswith("~/"):
            text = self.env.get("HOME", "~") + text[1:]
        return file.parent / text


def _file(env: Mapping[str, str]) -> Path | None:
    if named := env.get("LLAMACTL_CONFIG"):
        return Path(named).absolute()
    home = env.get("XDG_CONFIG_HOME")
    user = (Path(home) if home else Path.home() / ".config") / "llamactl" / "config.toml"
    return next((file for file in (user, SYSTEM_FILE) if file.exists()), None)


def _paths_table(file: Path) -> dict[str, Any]:
    """Return [paths] of the file; a broken file has none: the daemon says what is wrong with it."""
    import tomllib  # here: most calls find no file

    try:
        table = tomllib.loads(file.read_text()).get("paths", {})
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _user_dir(env: Mapping[str, str], name: str, default: str) -> Path:
    return (Path(env[name]) if env.get(name) else Path.home() / default) / "llamactl"


def _default_runtime(env: Mapping[str, str]) -> Path:
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]).absolute() / "llamactl"
    return Path(tempfile.gettempdir()) / f"llamactl-{os.geteuid()}"


def ends_with_us(cgroup: str, pid: int) -> str | None:
    """Return why a daemon that is started from here would not outlive us; None: it would.

    `cgroup` is the text of /proc/self/cgroup: a service manager ends what is in a service's group
    together with it, whatever session it has.
    """
    if pid == 1:
        return "this is process 1: whatever it starts ends with it"
    paths = (line.rpartition(":")[2] for line in cgroup.splitlines())
    unit = next((path for path in paths if path.endswith(".service")), None)
    return None if unit is None else f"it would be in {unit.rpartition('/')[2]}, and end with it"


def spawn_daemon(places: Places, *, shared_cgroup: bool) -> None:
    """Have a daemon that outlives us: behind an installed socket of systemd, else started here.

    Raises `PlacesError`.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SPAWN, "" if shared_cgroup else _refusal()],
        env=places.daemon_env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stdout.strip().splitlines() or [f"status {done.returncode}"]
        raise PlacesError(f"there is no daemon: {said[-1]}")


def spawn_daemon_apart(places: Places, *, shared_cgroup: bool) -> str:
    """Do the same without waiting for it. Return why no daemon is started here; empty: one is."""
    refusal = "" if shared_cgroup else _refusal()
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _SPAWN, refusal],
        env=places.daemon_env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    child.returncode = 0  # it is not ours to wait for: Popen would warn that it still runs
    return refusal


def _refusal() -> str:
    """Return what to do instead of starting a daemon here; empty where one may be started."""
    why = ends_with_us(Path("/proc/self/cgroup").read_text(), os.getpid())
    scope = "--system" if os.geteuid() == 0 else "--user"
    return (
        ""
        if why is None
        else (
            f"none is started here, {why}, and the weights with it: "
            f"`llamactl systemd install {scope}` gives it a unit of its own "
            "(--allow-shared-cgroup starts it all the same)"
        )
    )


def cached_engine() -> str:
    """Return the path of llamactl's engine, or nothing where it has not been built."""
    there = subprocess.run(
        [sys.executable, *_ENGINE_PATH, "--cached"], capture_output=True, text=True, check=False
    )
    return there.stdout.strip()


def built_engine(say: Callable[[str], None]) -> str:
    """Return the path of llamactl's engine. Where there is none, that is said and one is built.

    Raises `PlacesError`.
    """
    if path := cached_engine():
        return path
    say("there is no engine yet: one is built, which takes 5 to 15 minutes")
    done = subprocess.run(
        [sys.executable, *_ENGINE_PATH], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise PlacesError("there is no engine and none could be built: name one by its path")
    return done.stdout.strip()
