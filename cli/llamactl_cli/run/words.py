"""The command line of `llamactl run`: our options, then the one of llama-server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OURS = "llama-server"
"""The name of llamactl's own engine."""
USAGE = """\
Usage: llamactl run [OPTIONS] -- llama-server ARGS...

  Stand in for `llama-server ARGS...`: the same for whoever starts it, but the engine is the
  daemon's. A start that differs from the one before in -c, -np or the port alone loads
  nothing and keeps the conversations. `llama-server` is the engine of llamactl; a path is
  that program.

Options:
  --linger SECONDS        How long the engine stays loaded for the next start once this one has
                          ended. [default: 10; 0 with layers on a GPU]
  --instance NAME         An engine beside others, with a daemon of its own.
  --passthrough           Run a llama-server that is not patched as it is, unsupervised.
  --overcommit            Load it even if memory is not known to suffice.
  --allow-shared-cgroup   Start a daemon even where it ends with the caller's service.
  -h, --help              Show this message and exit.

Exit codes: llama-server's own, and its signals; 125 where llamactl itself failed.
"""

NAMES_MAX = 32
LINGER_S_MAX = 86400.0
INSTEAD = {
    "--help": ("-h", "--help", "--usage", "--version", "-cl", "--cache-list", "--list-devices"),
    "--completion-bash": ("--completion-bash",),
}
"""What makes llama-server say something and exit."""
ELSEWHERE = (
    *("-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "-dr", "--docker-repo"),
    *("--models-dir", "--models-preset"),
)
"""Models that llama-server fetches, or many of them."""
REMEDY = "with -m FILE it would be kept for the next start"
ELSEWHERE_ENV = (
    *("LLAMA_ARG_HF_REPO", "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_DOCKER_REPO"),
    *("LLAMA_ARG_MODELS_DIR", "LLAMA_ARG_MODELS_PRESET"),
)


class UsageError(Exception):
    """The command line makes no sense."""


class NoAddressError(Exception):
    """llama-server's own command line names an address that is none."""


@dataclass(frozen=True)
class Words:
    """The command line, taken apart. `program` is as it was written, `args` what follows it."""

    program: str
    args: tuple[str, ...]
    linger_s: float | None = None
    instance: str | None = None
    passthrough: bool = False
    overcommit: bool = False
    shared_cgroup: bool = False


def parse(words: Sequence[str], env: Mapping[str, str]) -> Words | None:
    """Return the command line; None where help is asked for. Raises `UsageError`."""
    rest = list(words)
    linger, instance = env.get("LLAMACTL_LINGER_S") or None, env.get("LLAMACTL_INSTANCE") or None
    flags = dict.fromkeys(("--passthrough", "--overcommit", "--allow-shared-cgroup"), False)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, equals, value = rest.pop(0).partition("=")
        if name in {"-h", "--help"}:
            return None
        if name in flags and not equals:
            flags[name] = True
        elif name in {"--linger", "--instance"}:
            if not equals:
                if not rest:
                    raise UsageError(f"{name} needs a value")
                value = rest.pop(0)
            linger, instance = (value, instance) if name == "--linger" else (linger, value)
        else:
            raise UsageError(f"no such option: {name}")
    rest = rest[1:] if rest[:1] == ["--"] else rest
    if not rest:
        raise UsageError("there is no command to run: llamactl run -- llama-server ARGS...")
    if is_bare(rest[0]) and rest[0] != OURS:
        raise UsageError(
            f"{rest[0]!r} is neither {OURS} nor a path; a program is named by its path"
        )
    return Words(
        program=rest[0],
        args=tuple(rest[1:]),
        linger_s=None if linger is None else _seconds(linger),
        instance=None if instance is None else instance_name(instance),
        passthrough=flags["--passthrough"],
        overcommit=flags["--overcommit"],
        shared_cgroup=flags["--allow-shared-cgroup"],
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= LINGER_S_MAX:
        raise UsageError(f"--linger takes seconds from 0 to {LINGER_S_MAX:g}, not {text!r}")
    return value


def instance_name(text: str) -> str:
    """Return the name if it can be one; raises `UsageError`."""
    plain = text.replace("-", "").replace("_", "")
    known = plain.isascii() and plain.isalnum() and len(text) <= NAMES_MAX
    if not known or text[0] in "-_":
        rule = f"letters, digits, - and _, at most {NAMES_MAX}, a letter or digit first"
        raise UsageError(f"--instance takes a name ({rule}), not {text!r}")
    return text


def no_server(args: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Return why these arguments start no engine that could be supervised; None: they do."""
    names = {_spelling(arg) for arg in args}
    for spellings in INSTEAD.values():
        for name in spellings:
            if name in names:
                return f"{name} starts no server"
    for name in (*(n for n in ELSEWHERE if n in names), *(n for n in ELSEWHERE_ENV if env.get(n))):
        return f"{name}: the model is no file ({REMEDY})"
    named = names & {"-m", "--model"} or env.get("LLAMA_ARG_MODEL")
    if not named and not has_config(env):
        return f"no --model is given ({REMEDY})"
    return None


def has_config(env: Mapping[str, str]) -> bool:
    """Whether llama-server has a file that may set its options: what is in it, it says itself."""
    user = env.get("XDG_CONFIG_HOME") or Path(env.get("HOME", "/"), ".config")
    return any(Path(place, "llama.cpp", "config.ini").exists() for place in ("/etc", user))


def address(args: Sequence[str], env: Mapping[str, str]) -> tuple[str, int]:
    """Return where llama-server would listen. Raises what `place` raises."""
    host = _last(args, "--host") or env.get("LLAMA_ARG_HOST") or "127.0.0.1"
    return place(host, _last(args, "--port") or env.get("LLAMA_ARG_PORT") or "8080")


def place(host: str, port: str) -> tuple[str, int]:
    """Return the same if it can be relayed.

    Raises `NoAddressError` for what llama-server would not take either, else `UsageError`.
    """
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise NoAddressError(f"--port {port!r} is no port (0 to 65535)")
    if not host or any(char.isspace() for char in host):
        raise NoAddressError(f"--host {host!r} is no address")
    if "," in host or host.endswith(".sock") or "/" in host:
        why = "one address or name is relayed, and no unix socket"
        raise UsageError(f"--host {host!r}: {why} (`llamactl env` has the engine's own)")
    return host, int(port)


def _last(args: Sequence[str], name: str) -> str | None:
    found = [index for index, arg in enumerate(args[:-1]) if _spelling(arg) == name]
    return args[found[-1] + 1] if found else None


def _spelling(arg: str) -> str:
    """Return an option as it is listed: llama-server takes `_` for `-` in a long one."""
    return arg.replace("_", "-") if arg.startswith("--") else arg


def is_bare(program: str) -> bool:
    """Whether the program is named and no path: then llamactl's own engine is meant."""
    return os.sep not in program
