"""Check of what sets options of the engine beside our configuration: its own files, variables."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import procfs
from llamactl_supervisor.config import OWNED_ENV, unheard_message

from llamactl_cli.checks import fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llamactl_cli.checks import Finding
    from llamactl_cli.checks.case import Case

NAME = "engine options"
ASK = "--print-args-json"
"""Has the engine tell every option that it was given and by whom; it parses, prints and exits."""
ANSWER_S = 5.0
SYSTEM_FILE = Path("/etc/llama.cpp/config.ini")
LINES_MAX = 3
"""Lines of what it says against them that are repeated, the last ones."""
COMMAND_LINE = "argv"
"""What the engine calls its command line as a source."""
OURS = frozenset(["--api-key", "--api-key-file"])
"""Options that the daemon takes from the environment on purpose."""


def engine_options(case: Case) -> Iterator[Finding]:
    """Whether an option of the engine comes from where no configuration of ours says so.

    llama-server reads config.ini of llama.cpp first, then LLAMA_ARG_ variables, then its command
    line. Asked with what the engine that runs was started with, else with this environment.
    """
    path = None if case.request is None else case.request.engine_path
    env, arguments = _started_with(case.engine_pid, path)
    for name in sorted(OWNED_ENV & os.environ.keys()):
        yield warn(NAME, unheard_message(name), f"unset {name}; see `llamactl config docs`")
    files = [file for file in (SYSTEM_FILE, _user_file(env)) if file.exists()]
    if path is None:
        if files:
            yield _unasked(files)
        return
    try:
        done = subprocess.run(
            [path, ASK, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=env,
            timeout=ANSWER_S,
            check=False,
        )
        given = json.loads(done.stdout)["given"] if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError):
        given = None
        done = None
    said = [] if done is None else done.stderr.decode(errors="replace").splitlines()
    if given is not None:
        yield from _found([(each["name"], each["source"]) for each in given], files)
    elif said and not any(f"invalid argument: {ASK}" in line for line in said):
        do = "no engine starts until that is right"
        read = f" (it reads {', '.join(map(str, files))})" if files else ""
        why = "; ".join(said[-LINES_MAX:])
        yield fail(NAME, f"{path} does not take its options: {why}{read}", do)
    elif files:
        yield _unasked(files)


def _found(given: list[tuple[str, str]], files: list[Path]) -> Iterator[Finding]:
    holds = dict(given)  # the last one that sets an option
    named = {source for _, source in given}
    for file in files:
        if str(file) not in named:
            yield ok(NAME, f"{file} is read first, and sets nothing of a server's")
    foreign = [pair for pair in given if pair[1] != COMMAND_LINE and pair[0] not in OURS]
    if not foreign and not files:
        yield ok(NAME, "come from the command line alone")
    for source in sorted({source for _, source in foreign}):
        names = {name for name, each in foreign if each == source}
        held = sorted(name for name in names if holds[name] == source)
        lost = sorted(names - set(held))
        told = f"{source} sets {', '.join(held) or 'nothing that holds'}"
        told += f"; overridden: {', '.join(lost)}" if lost else ""
        away = f"take them out of {source}" if source.startswith("/") else f"unset {source}"
        do = f"{away}; llamactl shows what is in engine.extra_args, or after `up --`"
        yield warn(NAME, told, do) if held else ok(NAME, told)


def _unasked(files: list[Path]) -> Finding:
    told = f"{' and '.join(map(str, files))} may set some: llama-server reads that first"
    return warn(NAME, told, "keep what is meant for another program of llama.cpp out of it")


def _started_with(pid: int | None, path: str | None) -> tuple[dict[str, str], list[str]]:
    """Return environment and arguments of the engine that runs; without one, ours and none."""
    if pid is None:
        return {name: value for name, value in os.environ.items() if name not in OWNED_ENV}, []
    raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(each).partition("=") for each in raw if each)
    words = procfs.command_line(pid)
    began = words.index(path) if path in words else 0  # a script's interpreter comes before it
    return {name: value for name, _, value in pairs}, words[began + 1 :]


def _user_file(env: Mapping[str, str]) -> Path:
    home = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME") or "~").expanduser() / ".config")
    return Path(home) / "llama.cpp" / "config.ini"


CHECKS = (engine_options,)
