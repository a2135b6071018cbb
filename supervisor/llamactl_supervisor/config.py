"""The configuration: one TOML file, the environment, flags; and where each value came from.

The file is the one that `--config` or LLAMACTL_CONFIG names, else config.toml in the user's
configuration directory, else /etc/llamactl/config.toml. Its sections are the fields of `Config`:
a further section is one more line there.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
from pydantic import BaseModel, ConfigDict

from llamactl_supervisor.api_settings import ApiSettings
from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.fields import OWNED_ENV as OWNED_ENV
from llamactl_supervisor.fields import AbsolutePath  # noqa: TC001 - pydantic needs it
from llamactl_supervisor.fields import unheard_message as unheard_message
from llamactl_supervisor.models import EngineConfig, ReconfigureRequest, Takes
from llamactl_supervisor.paths import APP, ENV_PREFIX, default_directories, of_instance
from llamactl_supervisor.paths import Paths as Paths
from llamactl_supervisor.resolve import File, Value, resolve
from llamactl_supervisor.resolve import Flag as Flag
from llamactl_supervisor.resolve import Key as Key
from llamactl_supervisor.resolve import keys as keys
from llamactl_supervisor.settings import Settings as Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FILE_NAME = "config.toml"
FILE_ENV = f"{ENV_PREFIX}CONFIG"
SYSTEM_FILE = Path("/etc") / APP / FILE_NAME
EXPORTED_ENV = tuple(
    ENV_PREFIX + name
    for name in ("CONTROL_SOCKET", "ENGINE_LOG", "DAEMON_LOG", "ENGINE_SOCKET", "ENGINE_URL")
)
"""What `llamactl env` prints beside the directories; it sets nothing."""
OTHER_ENV = tuple(ENV_PREFIX + name for name in ("INSTANCE", "PATCHES_DIR", "FUZZ_S"))
"""What the command, the builder and the tests read."""
ONE_DAEMONS = ("api",)
"""Sections with what two daemons cannot both have; an instance has them by its environment."""
FILE_BYTES_MAX = 2**20
"""A file that is larger is no configuration."""
STDIN = "-"
"""The file that is stdin, where a file is asked for once."""
LIVE_FIELDS = frozenset(ReconfigureRequest.model_fields) - {"dry_run"}
"""Fields of [engine] that change on the loaded weights; the rest needs another process."""
AT_DAEMON_START = frozenset({"close_s"})
"""Fields of [daemon] that are read once."""


class Directories(BaseModel):
    """The three directories."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache_dir: AbsolutePath | None = None
    """Engines that were built and models that were fetched; default: the user's cache."""
    state_dir: AbsolutePath | None = None
    """What outlives a restart: intent, ledger, logs, page files; default: the user's state."""
    runtime_dir: AbsolutePath | None = None
    """Sockets and locks; default: llamactl in XDG_RUNTIME_DIR, else in the temporary directory."""


class Config(BaseModel):
    """All that can be configured; a field is a section of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineConfig = EngineConfig()
    daemon: Settings = Settings()
    api: ApiSettings = ApiSettings()
    paths: Directories = Directories()


class _EngineAlone(BaseModel):
    engine: EngineConfig = EngineConfig()


class _PathsAlone(BaseModel):
    paths: Directories = Directories()


class _DaemonAlone(BaseModel):
    daemon: Settings = Settings()


@dataclass(frozen=True)
class Loaded:
    """A configuration, its values by key with their sources, and what it was made of.

    `digest` is the SHA-256 of the file. `left_out`: sections of it that are not for an instance.
    """

    config: Config
    values: Mapping[str, Value]
    file: Path | None
    env: Mapping[str, str]
    digest: str | None = None
    left_out: tuple[str, ...] = ()

    @property
    def paths(self) -> Paths:
        """The directories; raises `path_too_long`."""
        chosen = self.config.paths.model_dump(exclude_none=True)
        return Paths.from_env({f"{ENV_PREFIX}{name.upper()}": chosen[name] for name in chosen})

    def again(self) -> Loaded:
        """Read the same file, or look for one if there was none, with the same environment."""
        return load(self.env, file=self.file)


def load(
    env: Mapping[str, str] | None = None,
    *,
    file: Path | None = None,
    flags: Mapping[str, Flag] | None = None,
) -> Loaded:
    """Return the configuration for `env` (default: the process's own); `flags` is by key.

    Raises `config_invalid` for a file that is missing though it was named, cannot be read, is no
    TOML or says something that makes no sense, `config_insecure` for one that others could have
    written, and `invalid_request` for the environment and the flags.
    """
    env = dict(os.environ if env is None else env)
    path = find(env, file)
    found = None if path is None else read(path)
    left_out: tuple[str, ...] = ()
    if found is not None and of_instance(env):
        left_out = tuple(name for name in ONE_DAEMONS if found.tables.get(name))
        kept = {name: table for name, table in found.tables.items() if name not in left_out}
        found = replace(found, tables=kept)
    config, values = resolve(
        Config,
        file=found,
        env=env,
        flags=flags or {},
        defaults={
            f"paths.{name}_dir": str(path) for name, path in default_directories(env).items()
        },
    )
    return Loaded(config, values, path, env, None if found is None else found.digest, left_out)


def left_out_message(loaded: Loaded) -> str:
    """Return what to tell of the sections that are `left_out`."""
    return (
        f"[{'], ['.join(loaded.left_out)}] of {loaded.file} is for the daemon without an instance: "
        f"an address has one daemon; {ENV_PREFIX}API_* give this one its own"
    )


def load_engine(path: Path) -> tuple[EngineConfig, tuple[str, ...]]:
    """Return the [engine] of a file, and which other sections it has.

    What [engine] leaves out is not set. `-` is stdin, and a pipe is a file as well: relative paths
    in them are those of the working directory. Raises what `load` raises of a file, and
    `config_invalid` where nothing is in [engine].
    """
    found = read(path, piped=True)
    others = tuple(name for name in found.tables if name in Config.model_fields.keys() - {"engine"})
    tables = {name: table for name, table in found.tables.items() if name not in others}
    env, alone = {"HOME": str(Path.home())}, File(found.path, tables)
    resolved, _ = resolve(_EngineAlone, file=alone, env=env, flags={}, defaults={})
    if not tables.get("engine"):
        raise _invalid(path, "nothing is in its [engine]; all of it would be default")
    return resolved.engine, others


def load_paths(
    env: Mapping[str, str] | None = None,
    *,
    file: Path | None = None,
    broken: Callable[[LlamactlError], object] | None = None,
) -> Paths:
    """Return the directories alone: whoever looks for a daemon needs nothing else to be right.

    The file is not even read where the environment names all three. A file that says nothing of
    use is an error, or with `broken`, which is told of it, as good as none.
    """
    env = dict(os.environ if env is None else env)
    wanted = [key for key in keys(Config) if key.section == "paths"]
    path = None if all(env.get(key.env) for key in wanted) else find(env, file)
    if path is None:
        return Paths.from_env(env)
    try:
        tables = {"paths": read(path).tables.get("paths", {})}
        config, _ = resolve(_PathsAlone, file=File(path, tables), env=env, flags={}, defaults={})
    except LlamactlError as exc:
        if broken is None:
            raise
        broken(exc)
        return Paths.from_env(env)
    chosen = config.paths.model_dump(exclude_none=True)
    return Paths.from_env(
        env | {key.env: chosen[key.field] for key in wanted if key.field in chosen}
    )


def load_settings(
    *, file: Path | None = None, broken: Callable[[LlamactlError], object]
) -> Settings:
    """Return [daemon] alone, for whoever cleans up: nothing that is broken keeps them from it.

    `broken` is told of it. Without the file the environment holds, without that the defaults do.
    """
    env = dict(os.environ)
    for path in dict.fromkeys((find(env, file), None)):
        try:
            tables = {} if path is None else {"daemon": read(path).tables.get("daemon", {})}
            left = None if path is None else File(path, tables)
            return resolve(_DaemonAlone, file=left, env=env, flags={}, defaults={})[0].daemon
        except LlamactlError as exc:
            broken(exc)
    return Settings()


def mistyped(env: Mapping[str, str]) -> dict[str, str | None]:
    """Return each variable that has our prefix and sets nothing, with the nearest name that does.

    An empty one is none: it sets nothing under any name.
    """
    import difflib

    ours = [*(key.env for key in keys(Config)), FILE_ENV]
    tails = [name.removeprefix(ENV_PREFIX) for name in ours]  # the prefix is like everything
    known = {*ours, *EXPORTED_ENV, *OTHER_ENV}
    named = sorted(name for name in env if name.startswith(ENV_PREFIX) and env[name])

    def nearest(name: str) -> str | None:
        found = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), tails, 1)
        return ENV_PREFIX + found[0] if found else None

    return {name: nearest(name) for name in named if name not in known}


def mistyped_message(name: str, nearest: str | None) -> str:
    """Return what to tell of one of `mistyped`."""
    return f"{name} sets nothing" + ("" if nearest is None else f": did you mean {nearest}?")


def takes(section: str, field: str) -> Takes:
    """Return what a changed value of this key needs to come into force, after a reload."""
    if section == "engine":
        return Takes.RELOAD if field in LIVE_FIELDS else Takes.ENGINE_RESTART
    early = section == "daemon" and field not in AT_DAEMON_START
    return Takes.RELOAD if early else Takes.DAEMON_RESTART


def daemon_env(paths: Paths) -> dict[str, str]:
    """Return our environment for a daemon of `paths` that runs in another working directory."""
    named = os.environ.get(FILE_ENV)
    chosen = {FILE_ENV: str(Path(named).absolute())} if named else {}
    return os.environ | chosen | paths.env()


def config_refused(exc: LlamactlError) -> LlamactlError:
    """Return the error of a reload that finds the configuration broken: nothing was changed."""
    details = {**exc.details, "reason": exc.code}
    return error(Code.CONFIG_REFUSED, exc.message, hint=exc.hint, details=details)


def find(env: Mapping[str, str], file: Path | None = None) -> Path | None:
    """Return the file to read: `file`, or the first that there is; None where there is none."""
    named = file or (Path(env[FILE_ENV]) if env.get(FILE_ENV) else None)
    if named is not None:
        return named.absolute()
    home = env.get("XDG_CONFIG_HOME")
    user = Path(home) / APP if home else Path(platformdirs.user_config_dir(APP))
    return next((path for path in (user / FILE_NAME, SYSTEM_FILE) if _is_there(path)), None)


def read(path: Path, *, piped: bool = False) -> File:
    """Return the file's TOML; raises `config_insecure`, `config_invalid`.

    `piped`: it may be a pipe, or stdin as `-`.
    """
    import tomllib  # here: most calls find no file

    try:
        data, is_pipe = _bytes(path, piped=piped)
        path = Path.cwd() / path.name if is_pipe else path.absolute()
        tables = tomllib.loads(data.decode())
        return File(path, tables, hashlib.sha256(data).hexdigest())
    except OSError as exc:
        raise _invalid(path, f"cannot be read: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise _invalid(path, f"is not UTF-8 at byte {exc.start}") from None
    except RecursionError:
        raise _invalid(path, "is nested too deeply") from None
    except ValueError as exc:
        raise _invalid(path, f"is no TOML: {exc}") from None


def _bytes(path: Path, *, piped: bool) -> tuple[bytes, bool]:
    """Read the file after it is proven that nobody else could have written it; is it a pipe?"""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.dup(0) if piped and str(path) == STDIN else os.open(path, flags)
    with os.fdopen(fd, "rb") as opened:
        found = os.fstat(fd)
        is_pipe = piped and not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode)
        if not (is_pipe or stat.S_ISREG(found.st_mode)) or found.st_size > FILE_BYTES_MAX:
            raise _invalid(path, f"is no file of at most {FILE_BYTES_MAX} bytes")
        if is_pipe:
            os.set_blocking(fd, True)
            data = opened.read(FILE_BYTES_MAX + 1)
            if len(data) > FILE_BYTES_MAX:
                raise _invalid(path, f"is more than {FILE_BYTES_MAX} bytes")
            return data, True
        if found.st_uid not in {0, os.geteuid()}:
            why, hint = f"belongs to uid {found.st_uid}", f"chown {os.geteuid()} {path}"
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            why, hint = "can be written by others", f"chmod go-w {path}"
        else:
            return opened.read(), str(path) == STDIN
    message = f"file {path}: {why}; it names programs that are run"
    raise error(Code.CONFIG_INSECURE, message, hint=hint, details={"file": str(path)})


def _invalid(path: Path, problem: str) -> LlamactlError:
    message = f"file {path}: {problem}"
    return error(Code.CONFIG_INVALID, message, details={"file": str(path)})


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # what cannot be looked at is not taken for absent: reading it says why
