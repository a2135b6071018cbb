"""The configuration: one TOML file, the environment, flags; and where each value came from.

The file is the one that `--config` or LLAMACTL_CONFIG names, else config.toml in the user's
configuration directory, else /etc/llamactl/config.toml. Its sections are the fields of `Config`:
a further section is one more line there.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
from pydantic import BaseModel, ConfigDict

from llamactl_supervisor.api_settings import ApiSettings
from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.fields import AbsolutePath  # noqa: TC001 - pydantic needs it
from llamactl_supervisor.models import EngineConfig
from llamactl_supervisor.paths import APP, ENV_PREFIX, default_directories
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
OTHER_ENV = (f"{ENV_PREFIX}PATCHES_DIR", f"{ENV_PREFIX}FUZZ_S")
"""What the builder and the tests read."""
FILE_BYTES_MAX = 2**20
"""A file that is larger is no configuration."""


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


class _PathsAlone(BaseModel):
    paths: Directories = Directories()


@dataclass(frozen=True)
class Loaded:
    """A configuration, its values by key with their sources, and what it was made of."""

    config: Config
    values: Mapping[str, Value]
    file: Path | None
    env: Mapping[str, str]

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
    config, values = resolve(
        Config,
        file=None if path is None else read(path),
        env=env,
        flags=flags or {},
        defaults={
            f"paths.{name}_dir": str(path) for name, path in default_directories(env).items()
        },
    )
    return Loaded(config, values, path, env)


def load_paths(
    env: Mapping[str, str] | None = None,
    *,
    broken: Callable[[LlamactlError], object] | None = None,
) -> Paths:
    """Return the directories alone: whoever looks for a daemon needs nothing else to be right.

    The file is not even read where the environment names all three. A file that says nothing of
    use is an error, or with `broken`, which is told of it, as good as none.
    """
    env = dict(os.environ if env is None else env)
    wanted = [key for key in keys(Config) if key.section == "paths"]
    path = None if all(env.get(key.env) for key in wanted) else find(env)
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


def mistyped(env: Mapping[str, str]) -> dict[str, str | None]:
    """Return each variable that has our prefix and sets nothing, with the nearest name that does.

    An empty one is none: it sets nothing under any name.
    """
    import difflib

    ours = [*(key.env for key in keys(Config)), FILE_ENV]
    known = {*ours, *EXPORTED_ENV, *OTHER_ENV}
    named = sorted(name for name in env if name.startswith(ENV_PREFIX) and env[name])
    return {
        name: next(iter(difflib.get_close_matches(name, ours, 1)), None)
        for name in named
        if name not in known
    }


def mistyped_message(name: str, nearest: str | None) -> str:
    """Return what to tell of one of `mistyped`."""
    return f"{name} sets nothing" + ("" if nearest is None else f": did you mean {nearest}?")


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


def read(path: Path) -> File:
    """Return the file's TOML; raises `config_insecure`, `config_invalid`."""
    import tomllib  # here: most calls find no file

    try:
        return File(path, tomllib.loads(_bytes(path).decode()))
    except OSError as exc:
        raise _invalid(path, f"cannot be read: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise _invalid(path, f"is not UTF-8 at byte {exc.start}") from None
    except RecursionError:
        raise _invalid(path, "is nested too deeply") from None
    except ValueError as exc:
        raise _invalid(path, f"is no TOML: {exc}") from None


def _bytes(path: Path) -> bytes:
    """Read the file after it is proven that nobody else could have written it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as opened:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_BYTES_MAX:
            raise _invalid(path, f"is no file of at most {FILE_BYTES_MAX} bytes")
        if found.st_uid not in {0, os.geteuid()}:
            why, hint = f"belongs to uid {found.st_uid}", f"chown {os.geteuid()} {path}"
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            why, hint = "can be written by others", f"chmod go-w {path}"
        else:
            return opened.read()
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
