"""The doctor finds what is wrong, says what to do, and touches nothing."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from cli_home import FAKE_ENGINE, GGUF_HEAD, Home, fresh_home
from llamactl_builder import build, cpu
from llamactl_builder.errors import ToolError
from llamactl_cli import limits, proc, versions
from llamactl_cli.checks import machine, places, service
from llamactl_cli.checks.case import Case
from llamactl_supervisor.models import EngineRequest, UpRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from llamactl_cli.checks import Finding

GIB = 2**30


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


def case_of(home: Home, **spec: Any) -> Case:
    asked = {"model": str(home.model), "port": home.port} | spec
    request = UpRequest(spec=EngineRequest.parse(asked), engine_path=str(FAKE_ENGINE))
    return Case(home.paths, None, "nobody answers", request)


def only(check: Callable[[Case], Iterator[Finding]], case: Case, name: str) -> Finding:
    """Return the one answer of that name."""
    [found] = [found for found in check(case) if found.check == name]
    return found


def levels(home: Home) -> dict[str, str]:
    found = json.loads(home.run("doctor", "--json").out)["findings"]
    return {each["check"]: each["level"] for each in found}


def test_a_fresh_home_is_well_and_stays_untouched(home: Home) -> None:
    ran = home.run("doctor")
    assert (ran.code, ran.err) == (0, ""), ran.out
    assert all(len(line) <= 80 or " " not in line.strip() for line in ran.out.splitlines())
    assert not home.paths.runtime.exists()
    assert not home.paths.state.exists()


def test_a_running_engine_is_well(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "of_engine", lambda *_: "11312 (0c1e570)")
    home.up()
    found = levels(home)
    assert {"port", "daemon", "control socket", "memory", "orphans"} <= set(found)
    assert "fail" not in found.values()
    daemon = psutil.Process(home.run("status", "--json").result["daemon"]["pid"])
    daemon.kill()
    daemon.wait(10)
    assert levels(home)["orphans"] == "warn"


def test_what_is_wrong_makes_the_exit_code_1(home: Home) -> None:
    home.paths.state.mkdir(mode=0o755)
    ran = home.run("doctor")
    assert ran.code == 1
    assert f"chmod 700 {home.paths.state}" in ran.out
    assert ran.out.splitlines()[-1].endswith(" 1 wrong")


def test_a_path_too_long_for_a_socket_is_an_answer(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as deep:
        deep.setenv("LLAMACTL_RUNTIME_DIR", "/" + "r" * 90)
        ran = home.run("doctor", "--json")
    assert ran.code == 1
    assert "107" in json.loads(ran.out)["findings"][0]["found"]


def test_a_saved_state_that_makes_no_sense_breaks_nothing(home: Home) -> None:
    home.paths.state.mkdir(mode=0o700)
    for text in ('{"desired": {"spec": {"port": "x"}}}', '{"desired": 7}', "[]", "\udcff"):
        home.paths.state_file.write_text(text, errors="surrogateescape")
        assert Case.of(home.paths).request is None


def test_a_port_that_somebody_has_is_named(home: Home) -> None:
    assert only(places.port, case_of(home), "port").level == "ok"
    with socket.socket() as other:
        other.bind(("127.0.0.1", home.port))
        other.listen()
        found = only(places.port, case_of(home), "port")
    assert found.level == "fail"
    assert str(home.port) in found.found
    assert found.do is not None
    assert "ss -ltnp" in found.do


@pytest.mark.parametrize(
    ("content", "said"), [(None, "There is no model"), (b"", "not a GGUF"), (b"GGML" * 9, "not a")]
)
def test_a_model_that_is_none(home: Home, content: bytes | None, said: str) -> None:
    home.model.unlink() if content is None else home.model.write_bytes(content)
    found = only(places.model, case_of(home), "model")
    assert found.level == "fail"
    assert said in found.found


def test_a_model_overwritten_in_place_is_found_and_a_replaced_one_is_fine(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = home.model.stat()
    monkeypatch.setattr(Case, "engine_pid", os.getpid())
    began = proc.began_at(os.getpid())
    assert began is not None
    mapped = {(identity.st_dev, identity.st_ino)}
    monkeypatch.setattr(proc, "mapped_files", lambda *_: mapped)
    os.utime(home.model, (began - 60, began - 60))
    assert only(places.model, case_of(home), "model").level == "ok"
    os.utime(home.model, (began + 60, began + 60))
    assert only(places.model, case_of(home), "model").level == "fail"
    new = home.root / "new.gguf"
    new.write_bytes(GGUF_HEAD)
    new.replace(home.model)
    assert only(places.model, case_of(home), "model").level == "ok"


def test_a_socket_open_to_others_is_wrong(home: Home) -> None:
    home.paths.runtime.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(home.paths.control_socket))
        home.paths.control_socket.chmod(0o666)
        assert only(places.control_socket, case_of(home), "control socket").level == "fail"
        home.paths.control_socket.chmod(0o600)
        assert only(places.control_socket, case_of(home), "control socket").level == "ok"


def test_a_full_disk_is_wrong(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    found = only(places.directories, case_of(home), "state directory")
    assert found.level == "fail"
    assert "1.0 MiB free" in found.found


def test_a_machine_that_cannot_build_is_wrong_only_without_an_engine(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise ToolError("compiler_missing", "No C compiler", "Install one")

    monkeypatch.setattr(build, "cached_engine", none)
    assert only(machine.engine, Case(home.paths, None, "", None), "build").level == "fail"
    assert only(machine.engine, case_of(home), "build").level == "warn"


def test_an_engine_that_does_not_run_is_wrong(home: Home) -> None:
    spec = EngineRequest.parse({"model": str(home.model)})
    case = Case(home.paths, None, "", UpRequest(spec=spec, engine_path=str(home.root / "absent")))
    assert only(machine.engine, case, "engine").level == "fail"


def test_amx_that_is_advertised_and_not_granted_is_told(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = home.root / "cpuinfo"
    cpuinfo.write_text("flags : amx_tile sse\n")
    monkeypatch.setattr(machine, "CPUINFO", cpuinfo)
    monkeypatch.setattr(cpu, "kernel_grants_amx", lambda: False)
    assert "not granted" in only(machine.processor, case_of(home), "processor").found


def test_memory_that_the_smallest_limit_does_not_give(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = [limits.Bound("the machine", 64 * GIB), limits.Bound("cgroup x", 100)]
    monkeypatch.setattr(limits, "bounds", lambda _: bounds)
    found = only(machine.memory, case_of(home), "memory")
    assert found.level == "warn"
    assert "100 B free by cgroup x" in found.found


def test_another_command_of_our_name_is_found(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    other = home.root / "llamactl"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(home.root))
    found = only(service.command, case_of(home), "command")
    assert found.level == "warn"
    assert str(other) in found.found


def test_a_daemon_that_does_not_answer_is_wrong(home: Home) -> None:
    home.paths.runtime.mkdir(mode=0o700)
    with home.paths.daemon_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = only(service.daemon, case_of(home), "daemon")
    assert found.level == "fail"


def test_a_check_that_is_not_let_look_says_so(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Case) -> Iterator[Finding]:
        raise PermissionError(13, "Permission denied", "/proc/cpuinfo")
        yield

    monkeypatch.setattr(machine, "CHECKS", (refused,))
    assert levels(home)["refused"] == "warn"


def test_every_cgroup_on_the_path_is_a_bound(tmp_path: Path) -> None:
    """cgroup v2: the parent's limit counts, `max` is none, reclaimable cache is free."""
    fake_proc, root = tmp_path / "proc", tmp_path / "cgroup"
    inner = root / "outer" / "inner"
    (fake_proc / "7").mkdir(parents=True)
    inner.mkdir(parents=True)
    (fake_proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4096 kB\n")
    (fake_proc / "7" / "cgroup").write_text("0::/outer/inner\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("500\n")
    (root / "outer" / "memory.max").write_text("1000\n")
    (root / "outer" / "memory.current").write_text("900\n")
    (root / "outer" / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    assert limits.bounds(7, proc=fake_proc, root=root) == [
        limits.Bound("the machine", 4 * 2**20),
        limits.Bound(f"cgroup {root / 'outer'}", 400),
    ]


def test_a_memory_cgroup_of_version_1_is_a_bound(tmp_path: Path) -> None:
    fake_proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (fake_proc / "self").mkdir(parents=True)
    (fake_proc / "self" / "cgroup").write_text("5:cpu:/a\n4:memory:/a\n0::/\n")
    (root / "memory" / "a").mkdir(parents=True)
    (root / "memory" / "a" / "memory.limit_in_bytes").write_text("1000\n")
    (root / "memory" / "a" / "memory.usage_in_bytes").write_text("2000\n")
    [machine_bound, bound] = limits.bounds(None, proc=fake_proc, root=root)
    assert machine_bound.free_bytes == 0
    assert bound == limits.Bound(f"cgroup {root / 'memory' / 'a'}", 0)


def test_a_configuration_that_makes_no_sense_is_wrong(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMACTL_STOP_TERM_S", "soon")
    found = only(service.configuration, case_of(home), "configuration")
    assert found.level == "fail"
    assert "LLAMACTL_STOP_TERM_S" in found.found
    monkeypatch.setenv("LLAMACTL_STOP_TERM_S", "1")
    assert only(service.configuration, case_of(home), "configuration").level == "ok"
