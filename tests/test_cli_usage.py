"""What the command judges alone: spellings, bounds, and what needs a daemon that is not there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cli_home import COMMAND, Home, fresh_home
from llamactl_builder import build as builder
from llamactl_cli import options
from llamactl_cli.main import split_json
from llamactl_supervisor.models import DEFAULT_HOST, DEFAULT_N_CTX, DEFAULT_N_SEQ, DEFAULT_PORT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

N_CTX_RANGE = "from 256 to 2147483647"
N_SEQ_RANGE = "from 1 to 256"
SLOT_RANGE = "from 0 to 255"
COMMANDS = (
    *("up", "down", "status", "reconfigure", "logs", "start", "stop", "restart", "wait"),
    *("env", "version", "build", "serve", "reap", "systemd", "slots", "pages", "ledger", "reload"),
    *("config", "apply", "upgrade"),
    *("orphans", "top", "doctor", "validate", "bench", "completion"),
)


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


@pytest.mark.parametrize("command", ["up", "reconfigure", "apply"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--n-ctx", "0"), N_CTX_RANGE),
        (("--n-ctx", "-1"), N_CTX_RANGE),
        (("-c", "big"), N_CTX_RANGE),
        (("-c", "1000000000000"), N_CTX_RANGE),
        (("-c", "2097152k"), N_CTX_RANGE),
        (("-c", "2048m"), N_CTX_RANGE),
        (("-c", "1g"), N_CTX_RANGE),
        (("-c", "1" * 5000), N_CTX_RANGE),
        (("-c", ""), N_CTX_RANGE),
        (("-c", "4_096"), N_CTX_RANGE),
        (("--n-seq", "0"), N_SEQ_RANGE),
        (("-np", "257"), N_SEQ_RANGE),
        (("-np", "-1"), N_SEQ_RANGE),
        (("-np", "two"), N_SEQ_RANGE),
        (("-np",), "requires an argument"),
        (("--per-slot", "0"), N_CTX_RANGE),
        (("--per-slot", "1048576k", "-np", "4"), "1073741824 over 4 slots"),
        (("--per-slot", "4k", "-c", "16k"), "give one of the two"),
        (("--timeout", "0"), "above 0"),
        (("--timeout", "nan"), "above 0"),
        (("--timeout", "inf"), "above 0"),
        (("--no-such-option",), "No such option"),
    ],
)
def test_a_value_out_of_range_is_a_usage_error_that_names_the_range(
    home: Home, command: str, words: tuple[str, ...], said: str
) -> None:
    ran = home.run(command, *words)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "--help` lists what it takes" in ran.err
    assert not home.paths.runtime.exists()

    as_json = home.run(command, *words, "--json")
    assert as_json.code == 2
    assert as_json.error["code"] == "invalid_request"
    assert said in as_json.error["message"]


def test_a_reconfigure_that_changes_nothing_is_a_usage_error(home: Home) -> None:
    ran = home.run("reconfigure", "--dry-run", "--json")
    assert ran.code == 2
    assert ran.error["message"] == "nothing to change was given"
    assert "--n-seq" in ran.error["hint"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("256", 256), ("4096", 4096), ("2147483647", 2**31 - 1)),
        *(("128k", 131072), ("16K", 16384), ("1m", 2**20), ("2047M", 2047 * 2**20)),
    ],
)
def test_tokens_can_be_written_in_thousands(text: str, value: int) -> None:
    assert options.tokens(text) == value


def test_a_size_per_slot_is_multiplied_into_the_total() -> None:
    assert options.total_tokens(8192, 4) == 32768


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--model", "{root}/absent.gguf"), "model_missing", "absent.gguf"),
        (("--model", "{root}"), "model_is_directory", "is a directory"),
        (("--model", "/proc/version"), "model_not_gguf", "is not a GGUF model"),
        (("--engine", "{root}/absent"), "invalid_request", "not a program"),
        (("--engine", "{root}"), "invalid_request", "not a program"),
        (("--engine", "{root}/model.gguf"), "invalid_request", "not a program"),
        (("--api-key-file", "{root}/absent"), "invalid_request", "is not there"),
        (("--api-key-file", "{root}"), "invalid_request", "is no file; it holds one key"),
        (("--port", "0"), "invalid_request", "from 1 to 65535"),
        (("--port", "65536"), "invalid_request", "from 1 to 65535"),
        (("--host", "127.0.0.1,/tmp/engine.sock"), "invalid_request", "an IPv4 address"),
        (("--host", "example.org"), "invalid_request", "an IPv4 address"),
        (("model.gguf",), "invalid_request", "a model is given with --model"),
        (("--", "--ctx-size", "4096"), "owned_argument", "--ctx-size is set by the supervisor"),
        (("--", "--api-prefix", "/x"), "owned_argument", "and nothing else may set it"),
        (("--", "--api-key", "secret"), "owned_argument", "put a secret on the command line"),
    ],
)
def test_what_up_cannot_use_is_a_usage_error_before_anything_is_built(
    home: Home, words: tuple[str, ...], code: str, said: str
) -> None:
    ran = home.run("--json", "up", *(word.format(root=home.root) for word in words))
    assert ran.code == 2
    assert ran.error["code"] == code
    assert said in ran.error["message"]
    assert not home.paths.cache.exists()
    assert not home.paths.runtime.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("reconfigure", "-c", "128k", "-np", "4"),
        ("reconfigure", "--per-slot", "8k"),
        ("start",),
        ("stop",),
        ("restart",),
        ("reload",),
        ("apply", "-np", "3"),
        ("upgrade",),
        ("logs",),
        ("logs", "-f"),
        ("wait",),
        ("slots",),
        ("pages", "ls"),
        ("pages", "out", "0", "fox"),
        ("pages", "in", "fox", "0"),
        ("pages", "drop", "fox"),
        ("pages", "spill", "fox", "--to", "b", "--drop"),
        ("pages", "save", "0", "b"),
        ("pages", "restore", "b", "0"),
    ],
)
def test_without_a_daemon_the_exit_code_is_4(home: Home, words: tuple[str, ...]) -> None:
    ran = home.run(*words)
    assert (ran.code, ran.out) == (4, "")
    assert str(home.paths.control_socket) in ran.err
    assert home.run(*words, "--json").error["code"] == "daemon_unreachable"


def test_logs_without_a_daemon_names_the_file(home: Home) -> None:
    assert str(home.paths.engine_log) in home.run("logs").err


def test_logs_of_a_daemon_that_is_gone_are_read_from_the_files(home: Home) -> None:
    home.up()
    assert home.run("down").code == 0
    ran = home.run("logs", "-n", "1")
    assert (ran.code, ran.out) == (4, home.paths.engine_log.read_text().splitlines()[-1] + "\n")
    own = home.paths.daemon_log.read_text().splitlines()
    assert f"  | {own[-1]}" in ran.err
    assert f"the lines with this are the last of {home.paths.daemon_log}" in ran.err
    assert home.run("logs", "--since", "2999-01-01").out == ""
    told = home.run("logs", "--json")
    assert json.loads(told.out.splitlines()[-1])["at"] == ran.out.split()[0]
    assert json.loads(told.err)["error"]["details"]["last_lines"] == own[-12:]


def test_down_with_nothing_there_is_done_already(home: Home) -> None:
    assert home.run("down", "--json").result["outcome"] == "already_stopped"
    assert not home.paths.runtime.exists()


def test_env_and_version_need_no_daemon(home: Home) -> None:
    env = home.run("env")
    assert env.code == 0
    assert f"export LLAMACTL_RUNTIME_DIR={home.paths.runtime}" in env.out.splitlines()
    assert "URL" not in env.out
    assert "no daemon answers" in env.err
    assert home.run("env", "--json").result["engine_url"] is None
    version = home.run("version", "--json").result
    assert version.keys() == {"cli", "daemon", "engine", "engine_path"}
    assert version["cli"]
    assert version["daemon"] is None


def test_waiting_for_an_engine_that_does_not_come_times_out(home: Home) -> None:
    ran = home.run("wait", "--ready", "--timeout", "0.05")
    assert (ran.code, ran.out) == (6, "")
    assert "no daemon runs after 0.05 s" in ran.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(home: Home, command: str) -> None:
    ran = home.run(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"Usage: llamactl {command}" in ran.out
    assert "--json" in ran.out


@pytest.mark.parametrize("verb", ["ls", "out", "in", "drop", "spill", "save", "restore"])
def test_every_page_verb_has_help(home: Home, verb: str) -> None:
    ran = home.run("pages", verb, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"Usage: llamactl pages {verb}" in ran.out
    assert "--json" in ran.out
    assert f"\n  {verb} " in home.run("pages", "--help").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing command"),
        (("away",), "No such command"),
        (("out", "0"), "Missing argument 'NAME'"),
        (("out", "fox", "0"), SLOT_RANGE),
        (("in", "0", "fox"), SLOT_RANGE),
        (("in", "fox", "256"), SLOT_RANGE),
        (("in", "fox", "1" * 5000), SLOT_RANGE),
        (("in", "fox", "--", "-1"), SLOT_RANGE),
        (("drop", "fox", "0"), "unexpected extra argument"),
        (("drop", "x" * 513), "name: String should have at most 512 characters"),
        (("drop", "\udcff"), "name: Input should be a valid string"),
        (("drop", "fox", "--timeout", "0"), "above 0"),
        (("spill",), "Missing argument 'NAME'"),
        (("spill", "fox", "b"), "unexpected extra argument"),
        (("spill", "fox", "--to"), "requires an argument"),
        (("spill", "x" * 513), "name: String should have at most 512 characters"),
        (("spill", "fox", "--to", "x" * 513), "filename: String should have at most 512"),
        (("spill", "fox", "--to", "\udcff"), "filename: Input should be a valid string"),
        (("save", "0"), "Missing argument 'FILENAME'"),
        (("save", "b", "0"), SLOT_RANGE),
        (("restore", "0", "b"), SLOT_RANGE),
        (("restore", "b", "256"), SLOT_RANGE),
        (("restore", "\udcff", "0"), "filename: Input should be a valid string"),
        (("restore", "b", "0", "--timeout", "0"), "above 0"),
    ],
)
def test_a_page_verb_that_makes_no_sense_is_a_usage_error(
    home: Home, words: tuple[str, ...], said: str
) -> None:
    ran = home.run("--json", "pages", *words)
    assert ran.code == 2
    assert said in ran.error["message"]
    assert not home.paths.runtime.exists()


def test_no_words_at_all_is_a_request_for_help(home: Home) -> None:
    ran = home.run()
    assert (ran.code, ran.err) == (0, "")
    assert all(f"\n  {command} " in ran.out for command in COMMANDS)


def test_an_unknown_command_is_a_usage_error(home: Home) -> None:
    ran = home.run("statsu")
    assert (ran.code, ran.out) == (2, "")
    assert "Did you mean 'status'" in ran.err


def test_help_tells_the_defaults_that_the_wire_has(home: Home) -> None:
    said = re.sub(r"\s+", " ", home.run("up", "--help").out)
    assert f"{DEFAULT_N_CTX} tokens over {DEFAULT_N_SEQ} slots" in said
    assert f"on port {DEFAULT_PORT} of {DEFAULT_HOST}" in said


@pytest.mark.parametrize(
    ("argv", "words", "as_json"),
    [
        (["--json", "status"], ["status"], True),
        (["status", "--json"], ["status"], True),
        (["up", "--", "--json"], ["up", "--", "--json"], False),
        (["up", "--json", "--", "--json"], ["up", "--", "--json"], True),
        ([], [], False),
    ],
)
def test_json_may_stand_anywhere_before_the_engines_own_words(
    argv: Sequence[str], words: list[str], as_json: bool
) -> None:
    assert split_json(argv) == (words, as_json)


def test_a_machine_without_a_compiler_is_told_so(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(home.root))
    for words in (("build",), ("up", "--model", str(home.model))):
        ran = home.run(*words)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("llamactl: No C compiler")
        assert home.run(*words, "--json").error["code"] == "compiler_missing"


def test_build_prints_the_path_alone(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def ensure(**given: object) -> builder.EngineBuild:
        del given["progress"]
        asked.update(given)
        return builder.EngineBuild(Path("/e/llama-server"), "k", False, 260.0, False)

    monkeypatch.setattr(builder, "ensure_engine", ensure)
    ran = home.run("build", "--unpatched", "--cmake-arg", "-DA=1", "--cmake-arg", "-DB=2")
    assert (ran.code, ran.out) == (0, "/e/llama-server\n")
    assert ran.err == "built in 4 min 20 s\n"
    assert asked == {"unpatched": True, "cmake_args": ["-DA=1", "-DB=2"]}
    assert home.run("build", "--json").result == {
        "path": "/e/llama-server",
        "key": "k",
        "cached": False,
        "seconds": 260.0,
        "patched": False,
    }


def test_a_directory_that_cannot_be_made_is_one_line(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMACTL_STATE_DIR", "/proc/self/none")
    ran = home.run(*home.up_words())
    assert (ran.code, ran.out) == (1, "")
    assert "/proc/self/none" in ran.err


def test_a_runtime_directory_too_deep_for_a_socket_is_a_usage_error(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as deep:
        deep.setenv("LLAMACTL_RUNTIME_DIR", "/" + "r" * 90)
        ran = home.run("status", "--json")
    assert ran.code == 2
    assert ran.error["code"] == "path_too_long"


def test_a_working_directory_that_is_gone_is_named(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = home.root / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    ran = home.run("up", "--model", "m.gguf", "--json")
    assert (ran.code, ran.error["code"]) == (1, "working_directory_gone")
    assert ran.error["message"].startswith("the working directory is gone")


@pytest.mark.usefixtures("home")
def test_an_interrupt_is_130_and_no_traceback() -> None:
    words = [*COMMAND, "wait", "--ready"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == b"no daemon runs\n"
        waiting.send_signal(2)
        out, err = waiting.communicate(timeout=20)
    assert (waiting.returncode, out, err) == (130, b"", b"llamactl: interrupted\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(home: Home, shell: str) -> None:
    ran = home.run("completion", shell)
    assert (ran.code, ran.err) == (0, "")
    assert "_LLAMACTL_COMPLETE" in ran.out
    assert home.run("completion", "csh").code == 2


@pytest.mark.parametrize(
    ("typed", "number", "said"),
    [
        ("llamactl st", "1", {"status", "start", "stop"}),
        ("llamactl pages f", "2", {"fsck"}),
        ("llamactl ledger --si", "2", {"--since"}),
    ],
)
def test_what_a_shell_asks_for_is_completed(typed: str, number: str, said: set[str]) -> None:
    asks = {"_LLAMACTL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": number}
    done = subprocess.run(
        COMMAND, capture_output=True, text=True, env=os.environ | asks, check=True
    )
    assert set(done.stdout.split()) == said


@pytest.mark.parametrize("words", [["status"], ["status", "--json"]])
def test_an_interrupt_while_the_parser_is_imported_is_130_as_well(words: list[str]) -> None:
    script = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from llamactl_cli.main import main\n"
        f"sys.exit(main({words!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "interrupted" in done.stderr


@pytest.mark.usefixtures("home")
def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys, json; from llamactl_cli.main import main; main(['--help']);"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ
    )
    loaded = set(json.loads(done.stderr))
    heavy = {"httpx", "rich", "fastapi", "psutil", "llamactl_builder", "llamactl_supervisor.config"}
    assert not loaded & heavy


@pytest.mark.usefixtures("home")
def test_status_loads_only_what_it_needs() -> None:
    script = (
        "import sys, json; from llamactl_cli.main import main; main(['status']);"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ
    )
    loaded = set(json.loads(done.stdout))
    heavy = {"httpx", "rich", "fastapi", "uvicorn", "psutil", "llamactl_builder"}
    assert not loaded & heavy
    assert {name for name in loaded if name.startswith("llamactl_cli.commands.")} == {
        "llamactl_cli.commands.status"
    }
