"""Whether a caller of `llamactl run` means our files by the names that he gives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, LlamactlError, error

if TYPE_CHECKING:
    from collections.abc import Iterable

_HINT = "run the daemon where the caller runs: another container is another machine"


def require_same_users(pid: int) -> None:
    """Refuse a caller whose pid or users are not of our namespaces. Raises `forbidden`."""
    for name in ("user",) if pid else ("pid",):  # one that we cannot see has no pid for us
        if not _shared(pid, name):
            raise _forbidden(pid, f"is in another {name} namespace: its paths are not ours")


def require_same_files(pid: int, paths: Iterable[str]) -> None:
    """Refuse a caller for whom one of these absolute paths is another file. Raises `forbidden`.

    A service that systemd hardens has mounts of its own, of the very same files: what differs may
    be none that matters. A caller who cannot be looked at is believed.
    """
    if _shared(pid, "mnt"):
        return
    for path in paths:
        theirs = Path(f"/proc/{pid}/root", path.lstrip("/"))
        try:
            same = _identity(theirs) == _identity(Path(path))
        except PermissionError:
            continue
        if not same:
            raise _forbidden(pid, f"is in another mnt namespace, where {path} is another file")


def _shared(pid: int, namespace: str) -> bool:
    """Whether the namespace is ours too; True where that cannot be known."""
    try:
        theirs = Path(f"/proc/{pid}/ns/{namespace}").readlink() if pid else None
    except OSError:
        return True
    return theirs == Path(f"/proc/self/ns/{namespace}").readlink()


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file this is; None for none. Raises PermissionError."""
    try:
        found = path.stat()
    except PermissionError:
        raise
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _forbidden(pid: int, why: str) -> LlamactlError:
    return error(Code.FORBIDDEN, f"the caller (pid {pid}) {why}", hint=_HINT)
