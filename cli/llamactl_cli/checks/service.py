"""Checks of what runs: daemon, configuration, orphans, systemd, the `llamactl` that is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_cli import session, versions
from llamactl_cli.checks import fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamactl_cli.checks import Finding
    from llamactl_cli.checks.case import Case

SYSTEMD = Path("/run/systemd/system")
SYSTEMD_ANSWER_S = 1.0
COMMAND = "llamactl"


def daemon(case: Case) -> Iterator[Finding]:
    """Whether a daemon answers, and is of this version; whether its engine is well."""
    from llamactl_supervisor import locks, remains

    status = case.status
    if status is None:
        if locks.daemon_lives(case.paths):
            pid = case.paths.daemon_lock.read_text("utf-8", errors="replace").partition("\n")[0]
            do = f"look at {case.paths.daemon_log}; the engine outlives it: kill {pid}"
            yield fail("daemon", f"pid {pid} runs and does not answer: {case.silence}", do)
        elif (holder := locks.elsewhere(case.paths)) is not None:
            do = "ask it with its LLAMACTL_RUNTIME_DIR, or set another LLAMACTL_STATE_DIR as well"
            yield fail("daemon", f"{holder} has the state directory {case.paths.state}", do)
        else:
            yield ok("daemon", "none runs; `llamactl up` starts one")
            if (why := remains.given_up(case.paths)) is not None:
                yield fail("engine state", f"failed: {why.message}", why.hint or "`llamactl up`")
        return
    found, own = status.daemon, versions.own()
    if found.version == own:
        yield ok("daemon", f"pid {found.pid}, version {own}")
    else:
        told = f"pid {found.pid} is version {found.version}, this command {own}"
        yield warn("daemon", told, "`llamactl down`, then `up`, brings the new one")
    if status.problem is not None:
        do = status.problem.hint or "see `llamactl logs`"
        yield fail("engine state", f"{status.state}: {status.problem.message}", do)


def configuration(_: Case) -> Iterator[Finding]:
    """Whether file and environment make sense to the next daemon, and what they name is here."""
    from llamactl_supervisor import groundwork
    from llamactl_supervisor.config import load, mistyped, mistyped_message
    from llamactl_supervisor.errors import LlamactlError

    from llamactl_cli.provide import unnamed_engine

    try:
        loaded = load()
    except LlamactlError as exc:
        yield fail("configuration", exc.message, exc.hint or "`llamactl config check` says more")
    else:
        file = loaded.file
        yield ok("configuration", "no file" if file is None else str(file))
        for lacking in groundwork.problems(loaded, unnamed_engine(loaded)):
            yield fail("configured", lacking.message, lacking.hint or "see the message")
        for name, nearest in mistyped(loaded.env).items():
            yield warn("environment", mistyped_message(name, nearest), f"unset {name}")


def orphans(case: Case) -> Iterator[Finding]:
    """Whether engines run that no daemon owns."""
    from llamactl_supervisor import remains

    found = remains.recorded(case.paths)
    found += remains.unrecorded(case.paths, {each.pid for each in found})
    if case.status is not None:
        strangers = {stranger.pid for stranger in case.status.strangers}
        found = [each for each in found if each.pid in strangers]
    if found:
        pids = ", ".join(str(each.pid) for each in found)
        yield warn("orphans", f"no daemon owns pid {pids}", "see `llamactl orphans`")
    else:
        yield ok("orphans", "none")


def systemd(case: Case) -> Iterator[Finding]:
    """Whether systemd takes away at logout what it must not; how our unit is."""
    user = session.ends_at_logout(case.paths)
    if user is not None:
        told = f"{case.paths.runtime} and the sockets in it go at the last logout of {user}"
        yield warn("logout", told, f"loginctl enable-linger {user}")
    else:
        yield ok("logout", "takes nothing away")
    if not SYSTEMD.is_dir():
        yield ok("systemd", "does not run here")
        return
    for scope in ("--user", "--system"):
        yield ok(f"systemd {scope[2:]}", f"llamactl.service is {_unit_state(scope)}")


def command(_: Case) -> Iterator[Finding]:
    """Whether a shell finds this command by its name: other packages install one of that name."""
    first, own = shutil.which(COMMAND), Path(sys.executable).parent
    if first is None:
        yield ok("command", f"no {COMMAND} is on PATH; this one runs from {own}")
    elif Path(first).parent.resolve() == own.resolve() or _runs_here(Path(first)):
        yield ok("command", f"{COMMAND} on PATH is this one: {first}")
    else:
        do = f"put {own} before it on PATH, or call {own / COMMAND}"
        yield warn("command", f"another {COMMAND} is first on PATH: {first}", do)


def _runs_here(script: Path) -> bool:
    """Return whether the script is run by this very interpreter, as a link to it or by `#!`."""
    try:
        head = script.resolve().read_bytes()[:4096].split(b"\n", 1)[0]
    except OSError:
        return False
    return head == b"#!" + os.fsencode(sys.executable)


def _unit_state(scope: str) -> str:
    try:
        done = subprocess.run(
            ["systemctl", scope, "is-active", "llamactl.service"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SYSTEMD_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown: systemctl does not answer"
    return done.stdout.strip() or done.stderr.strip() or "unknown"


CHECKS = (daemon, configuration, orphans, systemd, command)
