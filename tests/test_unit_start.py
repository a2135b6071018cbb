"""`up` where our units are installed and not started: the daemon begins behind systemd's socket."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from cli_home import Home, fresh_home
from llamactl_cli import unit_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SYSTEMCTL = """#!/bin/sh
echo "$*" >> "{asked}"
case "$*" in
"{scope}show llamactl.socket llamactl.service --property=ActiveState,Listen,Environment")
    printf 'ActiveState={state}\\nListen={listen} (Stream)\\n\\n'
    printf 'Environment=A=1 LLAMACTL_STATE_DIR={directory}\\nActiveState=inactive\\n' ;;
"{scope}--no-ask-password start llamactl.socket")
    [ {starts} = yes ] || exit 1
    BY_SYSTEMD=1 setsid {python} -m llamactl_supervisor serve </dev/null >/dev/null 2>&1 &
    while [ ! -S "{listen}" ]; do :; done ;;
*) exit 1 ;;
esac
"""


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


@pytest.fixture
def booted(home: Home, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a machine that systemd booted; return where its systemctl is to be."""
    monkeypatch.setattr(unit_start, "SYSTEMD", home.root)
    monkeypatch.setenv("PATH", f"{home.root / 'bin'}:{os.environ['PATH']}")
    (home.root / "bin").mkdir()
    return home.root / "bin" / "systemctl"


def install(home: Home, systemctl: Path, **differs: str) -> None:
    """Have the units of these directories installed, but for what differs."""
    values = {
        "asked": str(home.root / "asked"),
        "scope": "--user ",
        "state": "inactive",
        "listen": str(home.paths.control_socket),
        "directory": str(home.paths.state),
        "starts": "yes",
        "python": sys.executable,
    }
    systemctl.write_text(SYSTEMCTL.format(**values | differs))
    systemctl.chmod(0o755)


def by_systemd(pid: int) -> bool:
    return "BY_SYSTEMD" in psutil.Process(pid).environ()


@pytest.mark.parametrize("scope", ["--user ", ""])
def test_an_installed_socket_is_started_and_the_daemon_with_it(
    home: Home, booted: Path, scope: str
) -> None:
    install(home, booted, scope=scope)
    ran = home.run(*home.up_words())
    assert ran.code == 0
    assert "systemd listens for it: systemctl " in ran.err
    daemon = home.run("status", "--json").result["daemon"]["pid"]
    assert by_systemd(daemon)
    asked = (home.root / "asked").read_text()
    assert home.run(*home.up_words(), "--json").result["daemon_pid"] == daemon
    assert (home.root / "asked").read_text() == asked, "one that answers is used as it is"


@pytest.mark.parametrize(
    "differs",
    [
        {"listen": "/run/user/1/llamactl/control.sock"},
        {"directory": "/var/lib/llamactl"},
        {"state": "active"},
        {"starts": "no"},
    ],
    ids=str,
)
def test_one_that_is_not_ours_or_does_not_start_is_none(
    home: Home, booted: Path, differs: dict[str, str]
) -> None:
    install(home, booted, **differs)
    ran = home.run(*home.up_words())
    assert ran.code == 0
    assert ("could not be started" in ran.err) is ("starts" in differs)
    assert not by_systemd(home.run("status", "--json").result["daemon"]["pid"])


def test_where_systemd_did_not_boot_nobody_is_asked(
    home: Home, booted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(home, booted)
    monkeypatch.setattr(unit_start, "SYSTEMD", home.root / "none")
    assert home.run(*home.up_words()).code == 0
    assert not (home.root / "asked").exists()
