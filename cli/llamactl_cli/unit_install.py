"""Unit files put in their place and taken away again; another's file is never lost."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, FailedError, error

from llamactl_cli.unit_files import NAMES, RUN_AS, SERVICE, SOCKET

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from llamactl_cli.unit_files import Scope

MARK = "# Written by `llamactl systemd install`"
ANSWER_S = 10.0
IN_USE = frozenset({"active", "activating", "reloading", "deactivating", "enabled"})


def systemd_version() -> int:
    """Return the number of this machine's systemd; raises `systemd_missing`."""
    found = re.match(r"systemd (\d+)", _answer("systemctl", "--version"))
    if found is None:
        hint = "`llamactl serve` runs the daemon in the foreground, for any service manager"
        raise FailedError("systemd_missing", "there is no systemctl on this machine", hint=hint)
    return int(found[1])


def install(files: Mapping[Path, str], scope: Scope, *, force: bool) -> dict[Path, str]:
    """Write the files; return what was done about each.

    Raises, before anything is written, `conflict` for a file that is not ours and for a service of
    another user (unless `force`), and `no_access`. What is replaced or removed is kept as *.bak.
    """
    obsolete = [path for path in installed(scope) if path not in files]
    foreign = [path for path in installed(scope) if not _ours(path)]
    foreign = [path for path in foreign if not _is(path, files.get(path))]
    if foreign and not force:
        raise error(
            Code.CONFLICT,
            f"{', '.join(map(str, foreign))}: not written by llamactl, left as it is",
            hint="--force replaces it and keeps it as .bak",
        )
    before = _user(scope)
    if scope.run_as is not None and before not in {None, scope.run_as} and not force:
        raise error(
            Code.CONFLICT,
            f"the service that is installed runs as {before}, and would run as {scope.run_as}",
            hint=f"--run-as {before}; --force changes it: what he has in "
            "/var/lib/llamactl is not the other's to read",
        )
    _check_access(scope.directory)
    done: dict[Path, str] = {}
    for path, text in files.items():
        if _is(path, text):
            done[path] = "unchanged"
            continue
        done[path] = "replaced" if _put_aside(path) else "written"
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        new.write_text(text)
        new.chmod(0o644)
        new.replace(path)
    for path in obsolete:
        _put_aside(path)
        done[path] = "removed"
    return done


def uninstall(scope: Scope, *, force: bool) -> dict[Path, str]:
    """Remove what `install` wrote; return what was done about each file.

    Raises `conflict`, before anything is removed, while systemd uses the units (unless `force`).
    """
    disable = " ".join((*scope.systemctl, "disable --now", SOCKET, SERVICE))
    for unit in (SERVICE, SOCKET):
        for question in ("is-active", "is-enabled"):
            answer = _answer(*scope.systemctl, question, unit).strip()
            if answer in IN_USE and not force:
                raise error(Code.CONFLICT, f"{unit} is {answer}", hint=f"first: {disable}")
    present = installed(scope)
    if present:
        _check_access(scope.directory)
    done: dict[Path, str] = {}
    for path in present:
        if not _ours(path) and not force:
            done[path] = "left: not written by llamactl"
            continue
        path.unlink()
        done[path] = "removed"
    for directory in {path.parent for path in present} - {scope.directory}:
        if not any(directory.iterdir()):
            directory.rmdir()
    return done


def installed(scope: Scope) -> list[Path]:
    """Return which of our files, or others in their place, are there."""
    return [path for name in NAMES if os.path.lexists(path := scope.directory / name)]


def put_aside(scope: Scope) -> list[Path]:
    """Return what `install` has kept of files that it replaced."""
    aside = (scope.directory / f"{name}.bak" for name in NAMES)
    return [path for path in aside if os.path.lexists(path)]


def _user(scope: Scope) -> str | None:
    """Return whom the service that is there runs as; None: there is none, or it is a user's own."""
    path = scope.directory / f"{SERVICE}.d" / RUN_AS
    text = path.read_text(errors="replace") if path.is_file() else ""
    found = re.search(r"^User=(.*)$", text, re.MULTILINE)
    return None if found is None else found[1]


def _ours(path: Path) -> bool:
    return not path.is_symlink() and path.read_text(errors="replace").startswith(MARK)


def _is(path: Path, text: str | None) -> bool:
    return path.is_file() and not path.is_symlink() and path.read_text(errors="replace") == text


def _put_aside(path: Path) -> bool:
    """Keep what is there as *.bak, which systemd ignores; return whether anything was there."""
    there = os.path.lexists(path)
    if there:
        path.replace(path.with_name(f"{path.name}.bak"))
    return there


def _check_access(directory: Path) -> None:
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        hint = "use sudo, or --user for a service of your own"
        raise error(Code.NO_ACCESS, f"{there} cannot be written", hint=hint)


def _answer(*command: str) -> str:
    """Return what the command says; nothing where there is no such command."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
