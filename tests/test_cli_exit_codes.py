"""Each exit code that scripts rely on, by every command whose help lists it: see `app.EXITS`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cli_home import COMMAND, Home, fresh_home, serving
from llamactl_cli.app import ANY, COMMANDS, EXITS, GROUPS
from llamactl_supervisor.errors import ExitCode
from llamactl_supervisor.spawn import spawn_daemon
from sandbox import until

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY = [
    *(name for name in COMMANDS if name != "run"),  # that one has llama-server's codes
    *(f"{group} {name}" for group, (_, names) in GROUPS.items() for name in names),
]
TAKES = {
    "reconfigure": ("-np", "3"),
    "pages out": ("0", "fox"),
    "pages in": ("fox", "0"),
    "apply": ("-np", "3"),
    "pages drop": ("fox",),
    "pages spill": ("fox",),
    "pages save": ("0", "fox"),
    "pages restore": ("fox", "0"),
}
"""What a command needs to be asked for something."""
VERBS = ["reconfigure", "slots", *(name for name in EXITS if name.startswith("pages "))]
"""What only an engine can do."""
ABSENT_4 = [
    *VERBS,
    "apply",
    "upgrade",
    "reload",
    "logs",
    "start",
    "stop",
    "restart",
    "wait",
    "status",
    "top",
]
SILENT_4 = ["up", "down"]
STOPPED_3 = [*VERBS, "status", "top"]
UNASKED_3 = ["start", "restart", "apply", "upgrade"]
STARTING_5 = [*VERBS, "restart", "reload"]
STARTING_6 = ["up", "start", "wait", "apply"]
ENDING_5 = ["start", "stop", "up"]
ENDING_6 = ["stop", "down"]
FROZEN_6 = [*VERBS, "restart"]
RUNNING_5 = ["reap", "serve"]
OTHERWISE = [
    *(("reload", 6), ("serve", 3), ("systemd install", 5)),
    *(("apply", 5), ("upgrade", 5), ("upgrade", 6)),
    *(("down", 5), ("systemd uninstall", 5), ("bench", 5)),
]
"""Each with a test of its own, those of apply and upgrade in test_cli_apply.py, the last three in
test_cli_look.py, test_systemd.py and test_bench.py."""


@pytest.fixture(scope="module")
def running() -> Iterator[Home]:
    with fresh_home() as home:
        home.up("--fake-refuse", "context_build_failed", "--fake-busy")
        yield home


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


def words(home: Home, command: str, timeout_s: float | None = None) -> tuple[str, ...]:
    """Return a whole command line."""
    late = () if timeout_s is None else ("--timeout", str(timeout_s))
    if command == "up":
        return (*home.up_words(), *late)
    return (*command.split(), *TAKES.get(command, ()), *late)


def codes(home: Home, commands: list[str], timeout_s: float | None = None) -> dict[str, int]:
    return {each: int(home.run(*words(home, each, timeout_s)).code) for each in commands}


def test_the_codes_are_those_of_the_contract() -> None:
    assert sorted(ExitCode) == [0, 1, 2, 3, 4, 5, 6, 130]


@pytest.mark.parametrize(
    "words",
    [
        *(("status",), ("status", "--json"), ("ledger",), ("orphans",), ("env",), ("version",)),
        *(("wait",), ("wait", "--ready"), ("start",), ("logs", "-n", "1"), ("top", "--once")),
    ],
)
def test_0_it_was_done(running: Home, words: tuple[str, ...]) -> None:
    assert running.run(*words).code == 0


@pytest.mark.parametrize(
    "words", [("frobnicate",), ("stop", "now"), ("wait", "--timeout", "0"), ("reconfigure", "-c")]
)
def test_2_it_makes_no_sense(running: Home, words: tuple[str, ...]) -> None:
    assert running.run(*words).code == 2
    assert running.run("status").code == 0


def test_5_it_was_refused(running: Home) -> None:
    ran = running.run("reconfigure", "-c", "128k", "--json")
    assert (ran.code, ran.error["code"]) == (5, "context_build_failed")
    another = running.run(*running.up_words(), "-c", "64k")
    assert another.code == 5


def test_6_it_did_not_happen_in_time(running: Home) -> None:
    ran = running.run("pages", "out", "0", "fox", "--timeout", "0.1", "--json")
    assert ran.code == 6
    assert json.loads(ran.err.splitlines()[-1])["error"]["code"] == "timed_out"


def test_every_code_of_every_command_has_its_test() -> None:
    cases = {
        *((name, 4) for name in (*ABSENT_4, *SILENT_4)),
        *((name, 3) for name in (*STOPPED_3, *UNASKED_3)),
        *((name, 5) for name in (*STARTING_5, *ENDING_5, *RUNNING_5)),
        *((name, 6) for name in (*STARTING_6, *ENDING_6, *FROZEN_6)),
        *OTHERWISE,
    }
    assert cases == {(name, code) for name, own in EXITS.items() for code in own}


@pytest.mark.parametrize("command", EVERY)
def test_2_and_1_of_every_command_and_its_help(command: str) -> None:
    """Usage; a result that nobody takes; and what the help lists is what there is."""
    with fresh_home() as home:
        nonsense = home.run(*command.split(), "--nonsense")
        assert (nonsense.code, nonsense.out) == (2, "")
        listed = home.run(*command.split(), "--help").out.rpartition("Exit codes:")[2]
        found = [int(part.split()[0]) for part in " ".join(listed.split()).split(";")]
        assert found == sorted({*ANY, *EXITS.get(command, ())})
    closed = ["sh", "-c", 'exec "$@" --help >&-', "-", *COMMAND, *command.split()]
    assert subprocess.run(closed, capture_output=True, timeout=30).returncode == 1


@pytest.mark.usefixtures("home")
def test_0_without_a_daemon() -> None:
    every = ["ledger", "orphans", "env", "version", "down", "reap --json", "config show"]
    every += ["config check", "config docs", "completion bash"]
    for command in every:
        ran = subprocess.run([*COMMAND, *command.split()], capture_output=True, timeout=30)
        assert ran.returncode == 0, command


def test_4_there_is_no_daemon(home: Home) -> None:
    assert codes(home, ABSENT_4) == dict.fromkeys(ABSENT_4, 4)


def test_4_the_daemon_does_not_answer(home: Home) -> None:
    home.up()
    daemon = int(home.paths.daemon_lock.read_text().split("\n")[0])
    with frozen(daemon):
        assert codes(home, SILENT_4) == dict.fromkeys(SILENT_4, 4)


def test_3_the_engine_is_stopped(home: Home) -> None:
    home.up()
    assert home.run("stop").code == 0
    assert codes(home, STOPPED_3) == dict.fromkeys(STOPPED_3, 3)


def test_3_no_engine_was_asked_for(home: Home) -> None:
    spawn_daemon(home.paths)
    assert codes(home, UNASKED_3) == dict.fromkeys(UNASKED_3, 3)


def test_3_the_daemon_ends_with_an_engine_that_was_given_up(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMACTL_ON_FAILED", "exit")
    monkeypatch.setenv("LLAMACTL_CRASHES_MAX", "0")
    with serving() as daemon:
        home.await_daemon()
        home.run(*home.up_words("--fake-lives-s", "0.1"))
        assert daemon.wait(30) == 3


def test_5_and_6_while_the_engine_starts(home: Home) -> None:
    late = home.run(*home.up_words(), "--timeout", "0.5", "--", "--fake-never-ready")
    assert late.code == 6
    assert codes(home, STARTING_5) == dict.fromkeys(STARTING_5, 5)
    same = [("start", "--timeout", "0.2"), ("wait", "--timeout", "0.2")]
    assert [home.run(*each).code for each in same] == [6, 6]


def test_5_and_6_while_engine_and_daemon_are_stopped(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMACTL_STOP_TERM_S", "10")
    home.up("--fake-ignore-term")
    assert home.run("stop", "--timeout", "0.2").code == 6
    assert home.run("start").code == 5
    assert home.run("down", "--timeout", "0.2").code == 6
    assert codes(home, ENDING_5) == dict.fromkeys(ENDING_5, 5)


def test_6_the_engine_does_not_answer(home: Home) -> None:
    pid = home.up()["pid"]
    for command in FROZEN_6:  # the last one ends the engine
        with frozen(pid):
            assert home.run(*words(home, command, 0.3)).code == 6, command
        assert home.run("wait", "--ready").code == 0


def test_6_a_reload_that_the_engine_does_not_answer(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = home.root / "config.toml"
    file.touch(0o600)
    monkeypatch.setenv("LLAMACTL_CONFIG", str(file))
    pid = home.up()["pid"]
    file.write_text("[engine]\nn_seq = 3\n")
    with frozen(pid):
        assert home.run("reload", "--timeout", "0.3").code == 6


def test_5_a_daemon_runs_already(home: Home) -> None:
    home.up()
    for command in RUNNING_5:
        ran = subprocess.run([*COMMAND, command], capture_output=True, timeout=30)
        assert ran.returncode == 5, command


def test_5_a_unit_that_is_not_ours(home: Home) -> None:
    unit = home.root / "config" / "systemd" / "user" / "llamactl.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\n")
    assert home.run("systemd", "install", "--user").code == 5


def test_1_the_engine_cannot_be_started(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMACTL_CRASHES_MAX", "0")
    assert home.run(*home.up_words("--fake-load-exit", "7")).code == 1
    assert home.run("start").code == 1
    assert home.run("wait", "--ready").code == 1
    assert home.run("restart").code == 1


def test_1_an_engine_that_is_lost_ends_what_was_asked_of_it(home: Home) -> None:
    home.up("--fake-reconfigure", "die")
    assert home.run("reconfigure", "-np", "3").code == 1


def test_1_conversations_are_lost_that_nobody_gave_up(home: Home) -> None:
    """The engine dies while they are written; a loss that is accepted is none to complain of."""
    home.up()
    for words, code, n_files in ((("restart",), 1, 0), (("restart", "--accept-loss"), 0, 2)):
        held = {"tokens": {"0": 50, "1": 7}, "dies_at": n_files + 2}
        _say(home, **held)
        ran = home.run(*words)
        assert ran.code == code, ran
        assert "1 brought back, 1 lost" in ran.out
        assert "lost: slot 1 (7 tokens)" in ran.out


@pytest.mark.parametrize("command", ["stop", "down"])
def test_1_a_stop_loses_conversations_that_nobody_gave_up(home: Home, command: str) -> None:
    pid = home.up()["pid"]
    _say(home, tokens={"0": 50}, full=True)
    ran = home.run(command, "--json")
    assert (ran.code, ran.result["outcome"]) == (1, "stopped")
    (lost,) = ran.result["carried"]["conversations"]
    assert (lost["what"], lost["fate"]) == ("slot 0", "lost")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert home.run("status").code == (3 if command == "stop" else 4)
    assert "1 lost: slot 0\n" in home.run("ledger").out
    assert home.run(command).code == 0, "it is told once"


def test_0_a_stop_loses_what_was_given_up(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMACTL_CARRY_S", "600")
    home.up("--fake-file-s", "600")
    _say(home, tokens={"0": 50})
    with subprocess.Popen([*COMMAND, "stop"], stdout=subprocess.PIPE, text=True) as begun:
        until(lambda: "writing 1 of 1" in home.run("status").out)
        second = home.run("stop", "--now")
        assert begun.wait(30) == second.code == 0
        assert "1 lost" in second.out
        assert "stopped at once, without the end of: writing 1 of 1" in second.out


def test_1_orphans_and_what_is_wrong(home: Home) -> None:
    pid = home.up()["pid"]
    os.kill(int(home.paths.daemon_lock.read_text().split("\n")[0]), signal.SIGKILL)
    until(lambda: home.run("status").code == 4)
    assert home.run("orphans").code == 1
    os.kill(pid, 0)
    home.paths.state.chmod(0o755)
    assert home.run("doctor").code == 1
    home.paths.state.chmod(0o700)


@pytest.mark.parametrize("command", ["up", "start", "wait"])
def test_130_a_wait_that_is_interrupted(home: Home, command: str) -> None:
    """The engine goes on; what waits says so on stderr before."""
    home.run(*home.up_words(), "--timeout", "0.5", "--", "--fake-never-ready")
    line = (*home.up_words(), "--", "--fake-never-ready") if command == "up" else (command,)
    waiting = subprocess.Popen([*COMMAND, *line], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    with waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(30) == 130
    assert home.run("status", "--json").result["state"] == "starting"


def _say(home: Home, **said: Any) -> None:
    """Have the engine be like that."""
    httpx.post(f"http://127.0.0.1:{home.port}/fake", json=said).raise_for_status()


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Have the process answer nobody."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "words",
    ["status --json", "status", "logs", "ledger --json", "--help", "config docs", "completion zsh"],
)
def test_a_closed_stdout_is_a_failure_and_no_traceback(running: Home, words: str) -> None:
    command = f'exec "$@" {words} >&-'
    ran = subprocess.run(["sh", "-c", command, "-", *COMMAND], capture_output=True, timeout=30)
    assert ran.returncode == 1
    assert b"stdout is closed" in ran.stderr
    assert b"Traceback" not in ran.stderr
    assert running.run("status").code == 0


def test_a_closed_stderr_loses_no_result() -> None:
    command = 'exec "$@" version --json 2>&- <&-'
    ran = subprocess.run(["sh", "-c", command, "-", *COMMAND], capture_output=True, timeout=30)
    assert (ran.returncode, json.loads(ran.stdout).keys() >= {"cli"}) == (0, True)
    command = 'exec "$@" frobnicate >&- 2>&-'
    ran = subprocess.run(["sh", "-c", command, "-", *COMMAND], capture_output=True, timeout=30)
    assert (ran.returncode, ran.stderr) == (2, b"")


def test_130_it_was_interrupted(running: Home) -> None:
    with subprocess.Popen([*COMMAND, "logs", "-f"], stdout=subprocess.PIPE) as following:
        assert following.stdout is not None
        following.stdout.readline()
        following.send_signal(2)
        assert following.wait(30) == 130
    assert running.run("status").code == 0


def test_logs_that_are_missing_are_said_to_be(running: Home) -> None:
    aside = running.paths.logs.with_name("aside")
    running.paths.logs.rename(aside)
    ran = running.run("logs")
    aside.rename(running.paths.logs)
    assert (ran.code, ran.out) == (0, "")
    assert f"there is no log: {running.paths.engine_log} is missing" in ran.err


def test_logs_since_reach_over_rotated_files(running: Home) -> None:
    old = running.paths.engine_log.with_name("engine.log.1")
    old.write_text("2026-01-01T00:00:00.000Z stderr old\n2026-01-02T00:00:00.000Z stderr newer\n")
    said = [json.loads(line)["text"] for line in _lines(running, "2026-01-01T12:00Z")]
    assert said[0] == "newer"
    assert "old" not in said
    assert [json.loads(line)["text"] for line in _lines(running, "0s")] == []
    last = [json.loads(line)["text"] for line in _lines(running, "2026-01-01", "-n", "1")]
    assert last == said[-1:]


def _lines(home: Home, since: str, *more: str) -> list[str]:
    return home.run("logs", "--json", "--since", since, *more).out.splitlines()


def test_reap_serve_and_completion_keep_to_json(home: Home) -> None:
    home.up()
    for word in ("reap", "serve"):
        ran = subprocess.run([*COMMAND, word, "--json"], capture_output=True, timeout=30)
        assert ran.returncode == 5
        told = json.loads(ran.stderr.splitlines()[-1])["error"]
        assert list(told) == ["code", "message", "hint", "details"]
        assert told["code"] == "daemon_running"
    script = home.run("completion", "bash", "--json").result
    assert script["shell"] == "bash"
    assert script["script"] == home.run("completion", "bash").out.rstrip("\n")
