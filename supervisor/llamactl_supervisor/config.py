"""Where things live and how long we wait: paths and settings, from the environment or defaults."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llamactl_supervisor.errors import Code, error

if TYPE_CHECKING:
    from collections.abc import Mapping

APP = "llamactl"
ENV_PREFIX = "LLAMACTL_"
SUN_PATH_BYTES_MAX = 107
"""Longest path of a unix socket: sun_path holds 108 bytes, the last one is NUL."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


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
            cache=_chosen(env, "CACHE_DIR") or Path(platformdirs.user_cache_dir(APP)),
            state=_chosen(env, "STATE_DIR") or Path(platformdirs.user_state_dir(APP)),
            runtime=_chosen(env, "RUNTIME_DIR") or _default_runtime(env),
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

    @property
    def control_socket(self) -> Path:
        """The control API's socket."""
        return self.runtime / "control.sock"

    @property
    def daemon_lock(self) -> Path:
        """Locked by the one daemon of this runtime directory for as long as it lives."""
        return self.runtime / "daemon.lock"

    @property
    def state_file(self) -> Path:
        """Intent and the engine's identity, for the next daemon."""
        return self.state / "state.json"

    @property
    def ledger_file(self) -> Path:
        """Every weight load and every load avoided, append-only."""
        return self.state / "ledger.jsonl"

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

    def engine_dir(self, instance_id: str) -> Path:
        """The private directory of one engine process: engine.sock, holder.json, exit.json."""
        return self.runtime / f"engine-{instance_id}"

    def create(self) -> None:
        """Create the directories, 0700. Raises `INSECURE_DIRECTORY` if another user could write."""
        for directory in (self.cache, self.state, self.runtime, self.logs, self.pages):
            make_private_dir(directory)


class Settings(BaseModel):
    """Times, budgets and sizes. Each is set by LLAMACTL_<NAME>, in the unit that ends its name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ready_stall_s: Seconds = 300.0
    """A load is given up when neither health nor log nor exit has moved for this long."""
    ready_poll_s: Seconds = 0.1
    """Pause between two questions for the engine's health while it loads."""
    stop_term_s: Seconds = 5.0
    """From TERM to KILL."""
    backoff_base_s: Seconds = 1.0
    """Upper bound of the first retry's delay; doubles with each crash."""
    backoff_cap_s: Seconds = 60.0
    """Upper bound of every retry's delay."""
    crashes_max: Annotated[int, Field(ge=0)] = 5
    """Retries before the engine is FAILED."""
    on_failed: Literal["stay", "exit"] = "stay"
    """What the daemon does once the engine is FAILED: wait for a person, or exit with status 3."""
    settle_s: Seconds = 180.0
    """READY for this long makes the next crash the first one again."""
    holder_exit_s: Seconds = 5.0
    """How long after the engine its holder may take to write the exit record."""
    close_s: Seconds = 2.0
    """How long open control connections may hold up the daemon's exit."""
    log_bytes_max: Annotated[int, Field(ge=4096)] = 16 * 2**20
    """Size at which the engine's log is rotated."""
    log_files_max: Annotated[int, Field(ge=1)] = 4
    """Log files kept, the current one included."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Return the settings for `env`; a value that makes no sense is an `INVALID_REQUEST`."""
        env = os.environ if env is None else env
        names = {name: ENV_PREFIX + name.upper() for name in cls.model_fields}
        given = {name: env[key] for name, key in names.items() if env.get(key)}
        try:
            return cls.model_validate(given)
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            key = names[str(first["loc"][0])]
            raise error(
                Code.INVALID_REQUEST, f"{key}={env[key]!r}: {first['msg']}", hint=f"unset {key}"
            ) from None


def make_private_dir(directory: Path) -> None:
    """Create `directory` as 0700 of this user, or prove that it is one.

    An empty directory of ours that others can enter is narrowed. One that holds something is not
    (it may be anybody's: a home, `/tmp`), and is an `INSECURE_DIRECTORY`, as is one that belongs to
    somebody else. One that cannot be had at all is `STATE_UNWRITABLE`.
    """
    choose = f"choose another directory with {ENV_PREFIX}*_DIR"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def _chosen(env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(ENV_PREFIX + name)
    return Path(value).absolute() if value else None


def _default_runtime(env: Mapping[str, str]) -> Path:
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]).absolute() / APP
    return Path(tempfile.gettempdir()) / f"{APP}-{os.geteuid()}"
