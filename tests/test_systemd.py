"""`llamactl systemd`: which units are written where, and that nothing of another's is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from cli_home import Home, fresh_home
from llamactl_cli import unit_files, unit_install
from llamactl_cli.unit_files import Scope
from llamactl_supervisor.errors import LlamactlError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEW, OLD = 257, 252
SERVICE, SOCKET = "llamactl.service", "llamactl.socket"


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home, pytest.MonkeyPatch.context() as machine:
        machine.setattr(unit_install, "systemd_version", lambda: NEW)
        yield home


@pytest.fixture
def system(tmp_path: Path) -> Scope:
    return Scope(tmp_path, "%t/llamactl", "%S/llamactl", "%C/llamactl", None, "daemon")


def units(home: Home) -> Path:
    """Return where a user's own units are."""
    return home.root / "config" / "systemd" / "user"


def settings(text: str) -> dict[str, str]:
    """Return the assignments of a unit, comments left out."""
    lines = (line for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


def service(scope: Scope, version: int = NEW, *, gpu: bool = False) -> dict[str, str]:
    """Return the settings of the service with its drop-ins."""
    files = unit_files.render(scope, version, gpu=gpu)
    return {
        name: value
        for path, text in files.items()
        if SERVICE in str(path)
        for name, value in settings(text).items()
    }


def test_the_service_keeps_the_contract(system: Scope) -> None:
    found = service(system)
    program = " ".join(unit_files.program())
    expected = {
        "Type": "notify-reload",
        "NotifyAccess": "main",
        "ExecStart": f"{program} serve",
        "ExecReload": f"{program} reload",
        "ExecStopPost": f"{program} reap --unit %n",
        "KillMode": "process",
        "KillSignal": "SIGTERM",
        "RestartKillSignal": "SIGUSR2",
        "Restart": "on-failure",
        "RestartSec": "1",
        "RestartPreventExitStatus": "2 3 5",
        "OOMPolicy": "continue",
        "WatchdogSec": "30",
        "TimeoutStartSec": "90",
        "TimeoutStopSec": "60",
        "StartLimitIntervalSec": "300",
        "StartLimitBurst": "5",
        "RuntimeDirectory": "llamactl",
        "RuntimeDirectoryMode": "0700",
        "RuntimeDirectoryPreserve": "yes",
        "StateDirectory": "llamactl",
        "UMask": "0077",
        "LimitMEMLOCK": "infinity",
        "LimitCORE": "0",
        "User": "daemon",
        "WantedBy": "multi-user.target",
    }
    assert found | expected == found


def test_an_older_systemd_gets_the_older_type(system: Scope) -> None:
    assert service(system, unit_files.NOTIFY_RELOAD_SINCE - 1)["Type"] == "notify"
    assert service(system, unit_files.NOTIFY_RELOAD_SINCE)["Type"] == "notify-reload"


def test_a_systemd_that_cannot_hand_over_is_told(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_install, "systemd_version", lambda: 239)
    assert "a restart loads the weights again" in home.run("systemd", "install", "--user").err
    monkeypatch.setattr(unit_install, "systemd_version", lambda: 244)
    assert home.run("systemd", "install", "--user").err == ""


def test_the_socket_is_where_the_daemon_looks_for_it(system: Scope) -> None:
    files = unit_files.render(system, NEW, gpu=False)
    found = settings(files[system.directory / SOCKET])
    assert (found["ListenStream"], found["SocketMode"]) == ("%t/llamactl/control.sock", "0600")
    assert '"LLAMACTL_RUNTIME_DIR=%t/llamactl"' in service(system)["Environment"]
    run_as = files[system.directory / f"{SOCKET}.d" / "20-run-as.conf"]
    assert settings(run_as) == {"SocketUser": "daemon"}


@pytest.mark.parametrize("gpu", [True, False])
def test_no_hardening_hides_a_model_or_breaks_what_runs(system: Scope, gpu: bool) -> None:
    found = service(system, gpu=gpu)
    forbidden = {"PrivateTmp", "MemoryDenyWriteExecute", "DynamicUser", "TemporaryFileSystem"}
    assert not forbidden & set(found)
    assert found["ProtectHome"] == "read-only"


def test_no_hardening_hides_a_gpu(system: Scope) -> None:
    found = service(system, gpu=True)
    hiding = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "ProtectHome"}
    assert hiding & set(found) == {"ProtectHome"}
    assert "NoNewPrivileges" not in found
    assert service(system, gpu=False)["PrivateDevices"] == "yes"


def test_paths_are_written_so_that_systemd_reads_them_as_they_are(
    system: Scope, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "100% mine $HOME" / "llamactl"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    escaped = str(program).replace("%", "%%").replace("$", "$$")
    assert service(system)["ExecStart"] == f'"{escaped}" serve'
    with pytest.raises(LlamactlError, match="cannot be written into a systemd unit"):
        unit_files.plain('/srv/"quoted"')
    with pytest.raises(LlamactlError, match="cannot be written into a systemd unit"):
        unit_files.plain("/srv\nExecStartPre=/bin/true")


def test_a_users_own_service_works_where_his_commands_do(home: Home) -> None:
    ran = home.run("systemd", "install", "--user", "--cpu", "--json")
    assert ran.code == 0
    assert ran.result["files"] == {
        str(units(home) / SOCKET): "written",
        str(units(home) / SERVICE): "written",
        str(units(home) / f"{SERVICE}.d" / "10-cpu.conf"): "written",
    }
    assert "systemctl --user daemon-reload" in ran.result["next"]
    text = (units(home) / SERVICE).read_text()
    for name, path in (
        ("RUNTIME", home.paths.runtime),
        ("STATE", home.paths.state),
        ("CACHE", home.paths.cache),
    ):
        assert f'"LLAMACTL_{name}_DIR={path}"' in text
    assert f"ListenStream={home.paths.control_socket}\n" in (units(home) / SOCKET).read_text()
    assert settings(text)["ExecStopPost"].endswith("reap --unit %n --user")
    assert settings(text)["WantedBy"] == "default.target"
    assert not {"User", "StateDirectory", "CacheDirectory"} & set(settings(text))
    assert not home.paths.runtime.exists()


def test_the_default_socket_is_the_managers_to_place(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMACTL_RUNTIME_DIR")
    monkeypatch.setenv("LLAMACTL_CONFIG", str(home.root / "llamactl.toml"))
    (home.root / "llamactl.toml").touch(0o600)
    files = home.run("systemd", "install", "--user", "--print", "--json").result["files"]
    assert "ListenStream=%t/llamactl/control.sock\n" in files[str(units(home) / SOCKET)]
    assert f'"LLAMACTL_CONFIG={home.root}/llamactl.toml"' in files[str(units(home) / SERVICE)]


def test_a_second_install_changes_nothing_and_another_kind_replaces_its_own(home: Home) -> None:
    home.run("systemd", "install", "--user", "--cpu")
    again = home.run("systemd", "install", "--user", "--cpu", "--json").result["files"]
    assert set(again.values()) == {"unchanged"}
    gpu = home.run("systemd", "install", "--user", "--gpu", "--json").result["files"]
    drop_ins = units(home) / f"{SERVICE}.d"
    assert gpu[str(drop_ins / "10-gpu.conf")] == "written"
    assert gpu[str(drop_ins / "10-cpu.conf")] == "removed"
    assert not (drop_ins / "10-cpu.conf").exists()


def test_what_another_wrote_is_refused_and_with_force_kept(home: Home) -> None:
    units(home).mkdir(parents=True)
    (units(home) / SERVICE).write_text("[Service]\nExecStart=/mine\n")
    refused = home.run("systemd", "install", "--user", "--json")
    assert (refused.code, refused.error["code"]) == (5, "conflict")
    assert str(units(home) / SERVICE) in refused.error["message"]
    assert [path.name for path in units(home).iterdir()] == [SERVICE]
    forced = home.run("systemd", "install", "--user", "--force", "--json").result["files"]
    assert forced[str(units(home) / SERVICE)] == "replaced"
    assert (units(home) / f"{SERVICE}.bak").read_text() == "[Service]\nExecStart=/mine\n"


def test_what_the_environment_sets_and_the_service_will_not_have_is_named(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMACTL_ENGINE_N_CTX", "8k")
    monkeypatch.setenv("LLAMA_API_KEY", "hush-hush")
    ran = home.run("systemd", "install", "--user", "--cpu")
    for name in ("LLAMACTL_ENGINE_N_CTX", "LLAMA_API_KEY", "LLAMACTL_STOP_TERM_S"):
        assert name in ran.out
    assert "hush" not in ran.out
    assert "LLAMACTL_STATE_DIR" not in ran.out, "that is in the unit"
    left = home.run("systemd", "install", "--user", "--cpu", "--json").result["left_out"]
    assert {"LLAMACTL_ENGINE_N_CTX", "LLAMA_API_KEY"} <= set(left)


def test_a_service_of_another_user_is_not_changed_unasked(system: Scope) -> None:
    unit_install.install(unit_files.render(system, NEW, gpu=False), system, force=False)
    other = replace(system, run_as="nobody")
    files = unit_files.render(other, NEW, gpu=False)
    with pytest.raises(LlamactlError, match="runs as daemon, and would run as nobody") as caught:
        unit_install.install(files, other, force=False)
    assert caught.value.code == "conflict"
    assert unit_install.install(files, other, force=True)
    assert service(other)["User"] == "nobody"


def test_a_file_that_the_services_user_cannot_have_is_refused(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "llamactl.toml"
    monkeypatch.setenv("LLAMACTL_CONFIG", str(file))
    words = ("systemd", "install", "--system", "--run-as", "nobody", "--print")
    ran = home.run(*words)
    assert (ran.code, "No such file" in ran.err) == (2, True)
    file.touch(0o600)
    ran = home.run(*words)
    assert ran.code == 2
    assert str(file) in ran.err
    assert "by nobody" in ran.err
    assert home.run(*words, "--force").code == 0


def test_what_was_edited_is_kept_when_it_is_replaced(home: Home) -> None:
    home.run("systemd", "install", "--user", "--cpu")
    unit = units(home) / SERVICE
    edited = unit.read_text() + "Environment=A=b\n"
    unit.write_text(edited)
    home.run("systemd", "install", "--user", "--cpu")
    assert "A=b" not in unit.read_text()
    assert unit.with_name(f"{SERVICE}.bak").read_text() == edited


def test_uninstall_names_what_install_had_kept(home: Home) -> None:
    units(home).mkdir(parents=True)
    (units(home) / SERVICE).write_text("[Service]\nExecStart=/mine\n")
    home.run("systemd", "install", "--user", "--force")
    left = home.run("systemd", "uninstall", "--user", "--json").result["next"]
    assert f"rm {units(home) / SERVICE}.bak  # kept by install" in left


def test_a_masked_unit_stays_masked(home: Home) -> None:
    units(home).mkdir(parents=True)
    (units(home) / SOCKET).symlink_to("/dev/null")
    assert home.run("systemd", "install", "--user").code == 5
    assert (units(home) / SOCKET).is_symlink()


def test_a_dry_run_prints_and_writes_nothing(home: Home) -> None:
    ran = home.run("systemd", "install", "--user", "--dry-run")
    assert ran.code == 0
    assert f"### {units(home) / SERVICE}\n# Written by" in ran.out
    assert not units(home).exists()


def test_uninstall_takes_away_what_install_wrote_and_no_more(home: Home) -> None:
    home.run("systemd", "install", "--user", "--cpu")
    own = units(home) / f"{SERVICE}.d" / "90-own.conf"
    own.write_text("[Service]\n")
    ran = home.run("systemd", "uninstall", "--user", "--json")
    assert set(ran.result["files"].values()) == {"removed"}
    assert [path for path in units(home).rglob("*") if path.is_file()] == [own]
    own.unlink()
    assert home.run("systemd", "uninstall", "--user").out == "there is nothing to remove\n"


def test_uninstall_leaves_a_unit_that_another_wrote(home: Home) -> None:
    home.run("systemd", "install", "--user", "--cpu")
    (units(home) / SOCKET).write_text("[Socket]\n")
    done = home.run("systemd", "uninstall", "--user", "--json").result["files"]
    assert done[str(units(home) / SOCKET)] == "left: not written by llamactl"
    assert (units(home) / SOCKET).exists()


def test_uninstall_is_refused_while_systemd_uses_the_units(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.run("systemd", "install", "--user", "--cpu")
    systemctl = home.root / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text('#!/bin/sh\n[ "$2" = is-enabled ] && echo enabled || echo inactive\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{systemctl.parent}:{os.environ['PATH']}")
    ran = home.run("systemd", "uninstall", "--user", "--json")
    assert (ran.code, ran.error["code"]) == (5, "conflict")
    assert ran.error["hint"] == f"first: systemctl --user disable --now {SOCKET} {SERVICE}"
    assert (units(home) / SERVICE).exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("install",), "one of the two is needed"),
        (("uninstall",), "one of the two is needed"),
        (("install", "--user", "--run-as", "root"), "goes with --system only"),
        (("install", "--system", "--run-as", "no-such-user"), "no user no-such-user"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(home: Home, words: list[str], said: str) -> None:
    ran = home.run("systemd", *words)
    assert ran.code == 2
    assert said in ran.err


def test_behind_sudo_the_service_runs_as_the_caller(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_USER", "nobody")
    files = home.run("systemd", "install", "--system", "--print", "--json").result["files"]
    run_as = files["/etc/systemd/system/llamactl.service.d/20-run-as.conf"]
    assert settings(run_as)["User"] == "nobody"


def test_without_systemd_it_says_what_there_is_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LlamactlError, match="no systemctl") as caught:
        unit_install.systemd_version()
    assert caught.value.hint is not None
    assert "llamactl serve" in caught.value.hint


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("user", [True, False])
def test_systemd_finds_nothing_wrong_with_the_units(
    system: Scope, tmp_path: Path, user: bool, gpu: bool
) -> None:
    """Every word of the output would be a warning. That the drop-ins are read is seen below."""
    own = Scope(tmp_path, "%t/llamactl", "/srv/state", "/srv/cache", "/srv/config.toml")
    scope = own if user else system
    files = unit_files.render(scope, unit_install.systemd_version(), gpu=gpu)
    unit_install.install(files, scope, force=False)
    assert verified(scope) == (0, "")
    drop_in = tmp_path / f"{SERVICE}.d" / ("10-gpu.conf" if gpu else "10-cpu.conf")
    drop_in.write_text("[Service]\nNoSuchSetting=yes\n")
    assert "NoSuchSetting" in verified(scope)[1]


def verified(scope: Scope) -> tuple[int, str]:
    """Return what `systemd-analyze verify` says of the installed units."""
    manager = "--user" if scope.run_as is None else "--system"
    paths = [str(scope.directory / name) for name in (SERVICE, SOCKET)]
    done = subprocess.run(
        ["systemd-analyze", manager, "verify", *paths],
        env=os.environ | {"XDG_RUNTIME_DIR": str(scope.directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
