"""Checks of places: directories, the control socket, the port, the model, the clients' keys."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_cli import smaps, text
from llamactl_cli.checks import fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamactl_cli.checks import Finding
    from llamactl_cli.checks.case import Case

SPACE_LOW_BYTES = 2**30
SPACE_NONE_BYTES = 64 * 2**20


def directories(case: Case) -> Iterator[Finding]:
    """Whether each directory is ours alone, can be written, and has space."""
    paths = case.paths
    for name, directory in (("cache", paths.cache), ("state", paths.state)):
        yield _directory(f"{name} directory", directory, name)
    yield _directory("runtime directory", paths.runtime, "runtime")
    flags = os.statvfs(_existing(paths.cache)).f_flag
    if flags & os.ST_NOEXEC:
        do = "another LLAMACTL_CACHE_DIR: the engine is run from there"
        yield fail("cache directory", f"{paths.cache} is mounted noexec", do)


def control_socket(case: Case) -> Iterator[Finding]:
    """Whether the control socket is open to us alone, and somebody listens."""
    from llamactl_supervisor import locks

    path = case.paths.control_socket
    try:
        found = path.stat()
    except OSError:
        yield ok("control socket", f"{path} is not there: no daemon")
        return
    closed = not stat.S_IMODE(path.parent.stat().st_mode) & 0o077
    if found.st_uid != os.geteuid() or (stat.S_IMODE(found.st_mode) & 0o077 and not closed):
        yield fail("control socket", f"others may use {path}", f"rm {path}, start the daemon again")
    elif case.status is None and locks.daemon_lives(case.paths):
        yield ok("control socket", f"{path} is a daemon's that does not answer")
    elif case.status is None:
        yield ok("control socket", f"{path} is a dead daemon's; the next one takes its place")
    else:
        yield ok("control socket", f"{path}, for this user only")


def port(case: Case) -> Iterator[Finding]:
    """Whether the engine's port is free, or the engine's."""
    from llamactl_supervisor.models import DEFAULT_HOST, DEFAULT_PORT

    spec = case.spec
    host, number = (DEFAULT_HOST, DEFAULT_PORT) if spec is None else (spec.host, spec.port)
    where = f"{host}:{number}"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE and case.engine_pid is not None:
            yield ok("port", f"{where} is in use while our engine runs")
            return
        do = f"another --port, or find who has it: ss -ltnp 'sport = :{number}'"
        yield fail("port", f"{where} cannot be bound: {exc.strerror}", do)
    else:
        yield ok("port", f"{where} is free")


def model(case: Case) -> Iterator[Finding]:
    """Whether the model is there, is one, and is still what the engine has mapped."""
    from llamactl_builder import models
    from llamactl_builder.errors import ModelError
    from llamactl_builder.paths import cache_dir

    asked = case.model
    path = Path(asked) if asked else cache_dir() / "models" / models.FILE_NAME
    if not asked and not path.exists():
        yield ok("model", "none was asked for; `llamactl up` fetches the default one")
        return
    try:
        models.check_gguf(path)
    except ModelError as exc:
        yield fail("model", exc.message, exc.hint or "name another with `llamactl up --model`")
        return
    pid = case.engine_pid
    if pid is not None and _overwritten(path, pid):
        found = f"{path} was written to while engine {pid} has it mapped"
        yield fail("model", found, "`llamactl restart`; replace a model by rename, not in place")
    else:
        yield ok("model", f"{text.size(path.stat().st_size)}, {path}")


def api_keys(case: Case) -> Iterator[Finding]:
    """Whether the clients' keys are this user's alone."""
    path = None if case.spec is None else case.spec.api_key_file
    if path is None:
        return
    mode = Path(path).stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield fail("API keys", f"others may write to {path}", f"chmod go-w {path}")
    elif mode & (stat.S_IRGRP | stat.S_IROTH):
        yield warn("API keys", f"others may read {path}", f"chmod 600 {path}; make new keys in it")
    else:
        yield ok("API keys", path)


def _overwritten(path: Path, pid: int) -> bool:
    """Return whether the very file that the engine has mapped changed after the engine began."""
    from llamactl_supervisor import procfs

    age_s = procfs.age_s(pid)
    found = path.stat()
    if age_s is None or found.st_mtime <= time.time() - age_s:
        return False
    return any(
        (found.st_dev, found.st_ino) == mapped for mapped in smaps.mapped_files(pid, path.suffix)
    )


def _directory(check: str, directory: Path, name: str) -> Finding:
    choose = f"another LLAMACTL_{name.upper()}_DIR"
    place = _existing(directory)
    made = place == directory
    if not os.access(place, os.W_OK | os.X_OK):
        return fail(check, f"{place} cannot be written", f"its permissions, or {choose}")
    found = place.stat()
    if made and found.st_uid != os.geteuid():
        return fail(check, f"{directory} belongs to uid {found.st_uid}", choose)
    if made and stat.S_IMODE(found.st_mode) & 0o077:
        return fail(check, f"others may enter {directory}", f"chmod 700 {directory}, or {choose}")
    free = shutil.disk_usage(place).free
    told = f"{directory}{'' if made else ' (not made yet)'}, {text.size(free)} free"
    if free < SPACE_NONE_BYTES:
        return fail(check, told, f"free space, or {choose}")
    if free < SPACE_LOW_BYTES and name != "runtime":
        return warn(check, told, f"free space, or {choose}")
    return ok(check, told)


def _existing(directory: Path) -> Path:
    """Return the directory, or the nearest above it that there is."""
    return next(place for place in (directory, *directory.parents) if place.exists())


CHECKS = (directories, control_socket, port, model, api_keys)
