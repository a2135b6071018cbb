"""Whether a service will have what its installer has: settings of the environment, the file."""

from __future__ import annotations

import os
import pwd
import stat
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from llamactl_cli.unit_files import Scope

ENGINE_PREFIX = "LLAMA_"
"""How the engine's own variables begin."""


def left_out(scope: Scope, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables of `env` that set something here and nothing in the service."""
    from llamactl_supervisor.config import Config, keys

    ours = {key.env for key in keys(Config) if key.section != "paths" or scope.run_as is not None}
    return tuple(
        name
        for name, value in sorted(env.items())
        if value and (name in ours or name.startswith(ENGINE_PREFIX))
    )


def check_config(path: Path, user: str) -> None:
    """Raise `config_invalid` where the daemon of `user` could not go by the file at `path`."""
    account = pwd.getpwnam(user)
    groups = {account.pw_gid, *os.getgrouplist(user, account.pw_gid)}
    try:
        closed = next(
            (each for each in reversed(path.parents) if not _may(each, 0o1, account, groups)), None
        )
        file = path.stat()
        if closed is not None:
            what = f"cannot be reached by {user}: {closed} is closed to him"
        elif not stat.S_ISREG(file.st_mode):
            what = "is no file"
        elif not _may(path, 0o4, account, groups):
            what = f"cannot be read by {user}"
        elif file.st_uid not in {0, account.pw_uid}:
            what = f"belongs to uid {file.st_uid}, and is to be root's or {user}'s"
        elif file.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            what = "can be written by others"
        else:
            return
    except OSError as exc:
        what = f"cannot be looked at: {exc.strerror}"
    raise error(
        Code.CONFIG_INVALID,
        f"the configuration {path} {what}: the service would not start",
        hint="set LLAMACTL_CONFIG to a file of the service's user, or put it right",
    )


def _may(path: Path, bit: int, account: pwd.struct_passwd, groups: Iterable[int]) -> bool:
    """Return whether the account has this permission bit there; access lists are not looked at."""
    found = path.stat()
    if account.pw_uid == 0:
        return True
    if found.st_uid == account.pw_uid:
        return bool(found.st_mode >> 6 & bit)
    return bool(found.st_mode >> (3 if found.st_gid in groups else 0) & bit)
