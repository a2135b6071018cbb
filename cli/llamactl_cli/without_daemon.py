"""What else there is to say to a command that finds no daemon: whose engine still runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamactl_supervisor.config import Paths
    from llamactl_supervisor.errors import DaemonUnreachableError


def explain(exc: DaemonUnreachableError) -> None:
    """Name in the error the engine that outlived the daemon, and what takes it over.

    Or the daemon of another runtime directory that has the state: none of ours can start then.
    """
    from llamactl_supervisor import locks, remains
    from llamactl_supervisor.config import load_paths
    from llamactl_supervisor.errors import LlamactlError

    if "pid" in exc.details:  # it lives, and its engine is its own
        return
    try:
        paths = load_paths(broken=lambda _: None)
    except LlamactlError:
        return
    holder = locks.elsewhere(paths)
    pids = remains.engine_pids(paths)
    if pids:
        exc.details["engine_pids"] = pids
    if holder is not None:
        exc.hint = f"{holder} has the state directory {paths.state}: ask it with its own"
        exc.hint += " LLAMACTL_RUNTIME_DIR"
        exc.details["state_owned_by"] = str(holder)
    elif (found := outlived(paths)) is not None:
        said = "" if exc.hint is None or exc.hint.startswith("start one") else f"; {exc.hint}"
        exc.hint = found + said


def outlived(paths: Paths) -> str | None:
    """Return which engine runs without a daemon and what to do about it; None where none does."""
    from llamactl_supervisor import remains

    engines = [found for found in remains.recorded(paths) if found.role == "engine"]
    if engines:
        adopted = "`llamactl up` adopts it, `down` stops it"
        do = adopted if engines[0].adoptable else "see `llamactl orphans`"
        return f"engine {engines[0].pid} outlived it: {do}"
    unproven = remains.unrecorded(paths, set())
    if unproven:
        return f"engine {unproven[0].pid} may be ours, which is not proven: see `llamactl orphans`"
    return None
