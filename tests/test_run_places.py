"""Where `llamactl run` looks for its daemon (where all do), and whether it starts one."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from llamactl_cli.run import places
from llamactl_cli.run.context import ENV_NAMES, ENV_PREFIXES, LIMITS, take
from llamactl_cli.run.places import Places, ends_with_us
from llamactl_supervisor import config, launch
from llamactl_supervisor.config import load_paths
from llamactl_supervisor.models import ProcessContext

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = '[paths]\nruntime_dir = "{}"\nstate_dir = "~/s"\n'


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"XDG_RUNTIME_DIR": "/run/user/1"},
        {"LLAMACTL_RUNTIME_DIR": "/r"},
        {"LLAMACTL_RUNTIME_DIR": ""},
        {"LLAMACTL_RUNTIME_DIR": "relative"},
    ],
)
def test_without_a_file(env: dict[str, str], tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": "/h"} | env
    assert Places(env).control_socket == str(load_paths(env).control_socket)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for a socket's; that of pytest does not."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.mark.parametrize("text", ["/r", "r", "~/r"])
@pytest.mark.parametrize("how", ["named", "usual"])
def test_as_the_file_says(text: str, how: str, short: Path) -> None:
    file = short / "llamactl" / "config.toml"
    file.parent.mkdir()
    file.write_text(FILE.format(text))
    env = {"HOME": "/h", "XDG_CONFIG_HOME": str(short)}
    if how == "named":
        env = {"HOME": "/h", "XDG_CONFIG_HOME": "/nowhere", "LLAMACTL_CONFIG": str(file)}
    assert Places(env).control_socket == str(load_paths(env).control_socket)


def test_a_broken_file_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[paths")
    env = {"LLAMACTL_CONFIG": str(file), "XDG_RUNTIME_DIR": "/run/user/1"}
    assert Places(env).control_socket == "/run/user/1/llamactl/control.sock"


def test_the_system_has_one_file() -> None:
    assert places.SYSTEM_FILE == config.SYSTEM_FILE


def test_an_instance_has_directories_below_everybodys() -> None:
    env = {"LLAMACTL_RUNTIME_DIR": "/r", "LLAMACTL_STATE_DIR": "/s", "LLAMACTL_INSTANCE": "b"}
    found = Places(env, "b")
    assert found.control_socket == "/r/instances/b/control.sock"
    paths = load_paths(found.daemon_env() | {"LLAMACTL_CACHE_DIR": "/c"})
    assert str(paths.control_socket) == found.control_socket
    assert str(paths.state) == "/s/instances/b"
    assert "LLAMACTL_INSTANCE" not in found.daemon_env()


@pytest.mark.parametrize(
    ("cgroup", "pid", "why"),
    [
        ("0::/system.slice/llama-swap.service\n", 70, "llama-swap.service"),
        ("3:memory:/x\n1:name=systemd:/system.slice/a.service\n0::/\n", 70, "a.service"),
        ("0::/user.slice/user-1.slice/session-2.scope\n", 70, None),
        ("0::/user.slice/user-1.slice/user@1.service/app.slice/term.scope\n", 70, None),
        ("0::/\n", 70, None),
        ("0::/\n", 1, "process 1"),
    ],
)
def test_where_a_daemon_would_end_with_us(cgroup: str, pid: int, why: str | None) -> None:
    found = ends_with_us(cgroup, pid)
    assert found is None if why is None else found is not None and why in found


@pytest.mark.parametrize("cached", [True, False])
def test_that_an_engine_is_built_is_said_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    builder = tmp_path / "python"
    there = "echo /cached" if cached else "exit 0"
    builder.write_text(f'#!/bin/sh\n[ "$5" = --cached ] && {{ {there}; exit; }}\necho /built\n')
    builder.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(builder))
    said: list[str] = []
    assert places.built_engine(said.append) == ("/cached" if cached else "/built")
    assert [line.partition(":")[0] for line in said] == (
        [] if cached else ["there is no engine yet"]
    )


def test_what_is_taken_down_is_what_the_daemon_gives() -> None:
    env = {"OMP_NUM_THREADS": "2", "XDG_CACHE_HOME": "/c", "XDG_SESSION_ID": "7", "PATH": "/bin"}
    context = ProcessContext.model_validate(take(env))
    assert context.env == {"OMP_NUM_THREADS": "2", "XDG_CACHE_HOME": "/c"}
    assert set(context.rlimits) == set(LIMITS)
    for name in (*ENV_NAMES, *(f"{prefix}X" for prefix in ENV_PREFIXES)):
        assert launch.callers(name)
    assert not any(launch.callers(name) for name in ("PATH", "HOME", "XDG_SESSION_ID", "LLAMACTL"))
