"""Where things live: three private directories and what lies in them."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from llamactl_supervisor.errors import Code, error

if TYPE_CHECKING:
    from collections.abc import Mapping

APP = "llamactl"
ENV_PREFIX = "LLAMACTL_"
INSTANCES = "instances"
"""What `--instance NAME` puts between everybody's directory and its own, beside the name."""
SUN_PATH_BYTES_MAX = 107
"""Longest path of a unix socket: sun_path holds 108 bytes, the last one is NUL."""


@dataclass(frozen=True)
class Paths:
    """The three directories, each private to one user, and what lies in them."""

    cache: Path
    state: Path
    runtime: Path

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Paths:
        """Return the paths for `env` (default: the process's own). Touches nothing.

        Raises `PATH_TOO_LONG` when a socket below the runtime directory could not be bound.
        """
        env = os.environ if env is None else env
        paths = cls(
            **{
                name: _chosen(env, name) or default
                for name, default in default_directories(env).items()
            }
        )
        for socket in (paths.control_socket, paths.engine_dir("0" * 32) / "engine.sock"):
            if len(os.fsencode(socket)) > SUN_PATH_BYTES_MAX:
                raise error(
                    Code.PATH_TOO_LONG,
                    f"the socket path {socket} has {len(os.fsencode(socket))} bytes; "
                    f"a unix socket can have {SUN_PATH_BYTES_MAX}",
                    hint=f"set {ENV_PREFIX}RUNTIME_DIR to a shorter directory",
                )
        return paths

    def env(self) -> dict[str, str]:
        """Return the environment that chooses these directories."""
        directories = {"CACHE": self.cache, "STATE": self.state, "RUNTIME": self.runtime}
        return {f"{ENV_PREFIX}{name}_DIR": str(path) for name, path in directories.items()}

    @property
    def control_socket(self) -> Path:
        """The control API's socket."""
        return self.runtime / "control.sock"

    @property
    def daemon_lock(self) -> Path:
        """Locked by the one daemon of this runtime directory for as long as it lives."""
        return self.runtime / "daemon.lock"

    @property
    def state_lock(self) -> Path:
        """Locked by the one daemon of this state directory, beside the other."""
        return self.state / "state.lock"

    @property
    def state_file(self) -> Path:
        """Intent and the engine's identity, for the next daemon."""
        return self.state / "state.json"

    @property
    def carry_file(self) -> Path:
        """Which conversations are in files until an engine takes them."""
        return self.state / "carry.json"

    @property
    def ledger_file(self) -> Path:
        """Every weight load and every load avoided, append-only."""
        return self.state / "ledger.jsonl"

    @property
    def crashes(self) -> Path:
        """A file for each of the last ends of the engine that nobody had asked for."""
        return self.state / "crashes"

    @property
    def logs(self) -> Path:
        """Engine and daemon logs."""
        return self.state / "logs"

    @property
    def engine_log(self) -> Path:
        """The engine's two output streams, written by its holder; rotated as .1, .2 and so on."""
        return self.logs / "engine.log"

    @property
    def daemon_log(self) -> Path:
        """Output of a daemon that `up` started."""
        return self.logs / "daemon.log"

    @property
    def pages(self) -> Path:
        """Where the engine writes pages and slots to files, unless it is told another place."""
        return self.state / "pages"

    @property
    def secrets(self) -> Path:
        """Secrets of the callers of `llamactl run`, for as long as an engine needs them."""
        return self.state / "secrets"

    def engine_dir(self, instance_id: str) -> Path:
        """The private directory of one engine process: engine.sock, holder.json, exit.json."""
        return self.runtime / f"engine-{instance_id}"

    def create(self) -> None:
        """Create the directories, 0700. Raises `INSECURE_DIRECTORY` if another user could write."""
        for directory in (
            *(self.cache, self.state, self.runtime),
            *(self.logs, self.crashes, self.pages, self.secrets),
        ):
            make_private_dir(directory)


def of_instance(env: Mapping[str, str]) -> bool:
    """Whether `env` names the directories of an instance, and not everybody's."""
    return Path(env.get(f"{ENV_PREFIX}RUNTIME_DIR", "")).parent.name == INSTANCES


def make_private_dir(directory: Path) -> None:
    """Create `directory` as 0700 of this user, or prove that it is one.

    An empty directory of ours that others can enter is narrowed. One that holds something is not
    (it may be anybody's: a home, `/tmp`), and is an `INSECURE_DIRECTORY`, as is one that belongs to
    somebody else. One that cannot be had at all is `STATE_UNWRITABLE`.
    """
    choose = f"choose another directory with {ENV_PREFIX}*_DIR"
    try:
        # One that is missing above it may be the next daemon's own: everybody's, of an instance.
        for each in (*reversed(directory.parents), directory):
            if not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)
        link, target = directory.lstat(), directory.stat()
        if {link.st_uid, target.st_uid} != {os.geteuid()}:
            raise error(
                Code.INSECURE_DIRECTORY,
                f"{directory} belongs to uid {target.st_uid}, not to uid {os.geteuid()}",
                hint=f"remove it, or {choose}",
            )
        if stat.S_IMODE(target.st_mode) & 0o077:
            if any(directory.iterdir()):
                raise error(
                    Code.INSECURE_DIRECTORY,
                    f"{directory} is in use and others may enter it",
                    hint=f"chmod 700 it if it is llamactl's alone, or {choose}",
                )
            directory.chmod(0o700)
    except OSError as exc:
        raise error(
            Code.STATE_UNWRITABLE,
            f"{directory} cannot be used as a directory: {exc.strerror or exc}",
            hint=choose,
        ) from exc


def default_directories(env: Mapping[str, str]) -> dict[str, Path]:
    """Return the three directories that are used where none is chosen."""
    return {
        "cache": Path(platformdirs.user_cache_dir(APP)),
        "state": Path(platformdirs.user_state_dir(APP)),
        "runtime": _default_runtime(env),
    }


def _chosen(env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(f"{ENV_PREFIX}{name.upper()}_DIR")
    return Path(value).absolute() if value else None


def _default_runtime(env: Mapping[str, str]) -> Path:
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]).absolute() / APP
    return Path(tempfile.gettempdir()) / f"{APP}-{os.geteuid()}"
