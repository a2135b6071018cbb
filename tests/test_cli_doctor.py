"""The doctor finds what is wrong, says what to do, and touches nothing."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from cli_home import GGUF_HEAD, Home, fresh_home
from llamactl_builder import build, cpu
from llamactl_builder.errors import ToolError
from llamactl_cli import smaps, versions
from llamactl_cli.checks import machine, options, places, service
from llamactl_cli.checks.case import Case
from llamactl_supervisor import memory, procfs
from llamactl_supervisor.models import EngineRequest, UpRequest
from sandbox import FAKE_ENGINE, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llamactl_cli.checks import Finding


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


def test_an_engine_that_was_given_up_is_wrong_with_its_daemon_and_without(home: Home) -> None:
    assert home.run(*home.up_words("--fake-load-exit", "3")).code == 1
    assert levels(home)["engine state"] == "fail"
    daemon = psutil.Process(json.loads(home.run("status", "--json").out)["daemon"]["pid"])
    daemon.kill()
    daemon.wait(10)
    assert levels(home)["engine state"] == "fail"


def test_an_engine_without_a_holder_is_told_by_status_doctor_and_logs(home: Home) -> None:
    home.up()
    engine = json.loads(home.run("status", "--json").out)["engine"]
    os.kill(engine["holder_pid"], 9)
    until(lambda: json.loads(home.run("status", "--json").out)["problem"])
    assert "holder was killed" in home.run("status").rows["problem"]
    assert levels(home)["engine state"] == "fail"
    assert "holder was killed" in home.run("logs").err


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
    age_s = procfs.age_s(os.getpid())
    assert age_s is not None
    began = time.time() - age_s
    mapped = {(identity.st_dev, identity.st_ino)}
    monkeypatch.setattr(smaps, "mapped_files", lambda *_: mapped)
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
        home.paths.control_socket.chmod(0o644)
        assert only(places.control_socket, case_of(home), "control socket").level == "ok"
        home.paths.runtime.chmod(0o711)
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


@pytest.mark.parametrize(
    ("there", "said"),
    [(memory.Available(100, "a limit"), "100 B free (a limit)"), (None, "free is not known")],
)
def test_memory_that_is_not_there(
    home: Home, monkeypatch: pytest.MonkeyPatch, there: memory.Available | None, said: str
) -> None:
    monkeypatch.setattr(memory, "available", lambda **_: there)
    found = only(machine.memory, case_of(home), "memory")
    assert found.level == "warn"
    assert said in found.found


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


def test_a_configuration_that_makes_no_sense_is_wrong(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMACTL_STOP_TERM_S", "soon")
    found = only(service.configuration, case_of(home), "configuration")
    assert found.level == "fail"
    assert "LLAMACTL_STOP_TERM_S" in found.found
    monkeypatch.setenv("LLAMACTL_STOP_TERM_S", "1")
    assert only(service.configuration, case_of(home), "configuration").level == "ok"


@pytest.fixture
def ini(home: Home, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where llama.cpp looks for options; nothing of this machine's own is looked at."""
    for name in [name for name in os.environ if name.startswith("LLAMA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(options, "SYSTEM_FILE", home.root / "absent.ini")
    file = home.root / "config" / "llama.cpp" / "config.ini"
    file.parent.mkdir(parents=True)
    return file


def options_of(home: Home, engine: Path) -> list[tuple[str, str]]:
    request = UpRequest(spec=EngineRequest.parse({"model": "/m.gguf"}), engine_path=str(engine))
    found = options.engine_options(Case(home.paths, None, "", request))
    return [(each.level, each.found) for each in found]


def test_what_the_engine_reads_beside_its_command_line_is_named(
    home: Home, ini: Path, engine_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine itself: the file's other keys, and the keys' own values, are not."""
    assert options_of(home, engine_path) == [("ok", "come from the command line alone")]
    ini.write_text("no-such = 1\n")
    unused = ("ok", f"{ini} is read first, and sets nothing of a server's")
    assert options_of(home, engine_path) == [unused]
    ini.write_text("threads = 2\nno-kv-unified = 1\napi-key = hush\n")
    monkeypatch.setenv("LLAMA_ARG_THREADS", "3")
    monkeypatch.setenv("LLAMA_API_KEY", "hush")
    assert options_of(home, engine_path) == [
        ("warn", f"{ini} sets --kv-unified; overridden: --threads"),
        ("warn", "LLAMA_ARG_THREADS sets --threads"),
    ]
    monkeypatch.setenv("LLAMA_ARG_API_PREFIX", "/x")
    unheard = "LLAMA_ARG_API_PREFIX is kept from the engine: llamactl sets that itself"
    assert ("warn", unheard) in options_of(home, engine_path)
    assert not [said for _, said in options_of(home, engine_path) if "sets --api-prefix" in said]
    monkeypatch.delenv("LLAMA_ARG_API_PREFIX")
    ini.write_text("threads = many\n")
    [(level, said)] = options_of(home, engine_path)
    assert (level, str(ini) in said) == ("fail", True)


def test_the_engine_that_runs_is_asked_with_what_it_was_started_with(
    home: Home, ini: Path, engine_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ini.write_text("c = 512\n")
    assert options_of(home, engine_path) == [("warn", f"{ini} sets --ctx-size")]
    command = [sys.executable, "-c", "input()", "-c", "4096"]
    env = {"XDG_CONFIG_HOME": str(home.root / "config"), "LLAMA_ARG_THREADS": "1"}
    monkeypatch.setattr(procfs, "command_line", lambda _: ["llama-server", *command[3:]])
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=env) as running:
        monkeypatch.setattr(Case, "engine_pid", running.pid)
        found = options_of(home, engine_path)
        running.kill()
    assert found == [
        ("ok", f"{ini} sets nothing that holds; overridden: --ctx-size"),
        ("warn", "LLAMA_ARG_THREADS sets --threads"),
    ]


def test_an_engine_that_cannot_say_leaves_the_file_named(home: Home, ini: Path) -> None:
    silent, absent = Path("/bin/true"), home.root / "absent"
    assert options_of(home, silent) == options_of(home, absent) == []
    ini.write_text("threads = 2\n")
    said = f"{ini} may set some: llama-server reads that first"
    assert options_of(home, silent) == options_of(home, absent) == [("warn", said)]
    none = Case(home.paths, None, "", None)
    assert only(options.engine_options, none, "engine options").found == said
