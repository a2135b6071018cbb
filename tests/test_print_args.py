"""`llama-server --print-args-json`: what a command line means, told by the parser itself."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

from llamactl_cli.run.words import INSTEAD
from llamactl_supervisor.fields import NO_SERVER_ARGS, OWNED_ARGS, OWNED_ENV

if TYPE_CHECKING:
    from pathlib import Path

OURS_THAT_SAY = {"--print-args-json", "--print-memory-json"}
"""They are no options of llama-server, and so in no table of it."""
CLASSES = {"live", "context", "server", "model"}


def asked(engine: Path, home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the engine for its answer; nothing of this machine's environment is given to it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    clean |= {"XDG_CONFIG_HOME": str(home)} | env
    words = [str(engine), "--print-args-json", *args]
    return subprocess.run(words, capture_output=True, text=True, env=clean, check=False)


def answer(engine: Path, home: Path, *args: str, **env: str) -> dict[str, Any]:
    """Return its JSON."""
    done = asked(engine, home, *args, **env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_option_has_a_name_a_class_and_an_arity(engine_path: Path, tmp_path: Path) -> None:
    options = {each["name"]: each for each in answer(engine_path, tmp_path)["options"]}
    assert len(options) > 150
    assert {each["class"] for each in options.values()} == CLASSES
    live = {name for name, each in options.items() if each["class"] == "live"}
    assert live == {"--ctx-size", "--parallel", "--kv-unified"}
    assert options["--threads"]["class"] == "context"
    assert options["--port"]["class"] == "server"
    assert options["--model"]["class"] == "model"
    assert [options[name]["arity"] for name in ("--kv-unified", "--model")] == [0, 1]
    assert options["--parallel"]["args"] == ["-np", "--parallel"]
    assert options["--parallel"]["env"] == "LLAMA_ARG_N_PARALLEL"


def test_what_the_supervisor_owns_is_so_in_every_spelling(
    engine_path: Path, tmp_path: Path
) -> None:
    """Its lists against the engine's own table; keys come by a variable as well, on purpose."""
    table = answer(engine_path, tmp_path)["options"]
    spelled = [{*each["args"], *each["args_neg"]} for each in table]
    owned = [each for each, args in zip(table, spelled, strict=True) if args & OWNED_ARGS]
    assert set().union(*(args for args in spelled if args & OWNED_ARGS)) == OWNED_ARGS
    silent = set().union(*(args for args in spelled if args & NO_SERVER_ARGS))
    assert silent | OURS_THAT_SAY == NO_SERVER_ARGS
    assert set().union(*INSTEAD.values()) == silent
    env = {each["env"] for each in owned if each["env"] and each["name"] != "--api-key-file"}
    env |= {
        each["env"].replace("LLAMA_ARG_", "LLAMA_ARG_NO_") for each in owned if each["args_neg"]
    }
    assert env == OWNED_ENV


def test_what_was_given_comes_in_order_with_its_source(engine_path: Path, tmp_path: Path) -> None:
    config = tmp_path / "llama.cpp" / "config.ini"
    config.parent.mkdir()
    config.write_text("c = 512\nno-jinja = 1\n")
    args = ("-m", "x.gguf", "-c", "4k", "--no_kv_unified", "-fa", "on")
    given = answer(engine_path, tmp_path, *args, LLAMA_ARG_THREADS="3")["given"]
    told = [(each["name"], each["values"], each["source"]) for each in given]
    assert sorted(told[:2]) == [
        ("--ctx-size", ["512"], str(config)),
        ("--jinja", ["0"], str(config)),
    ]
    assert told[2:] == [
        ("--threads", ["3"], "LLAMA_ARG_THREADS"),
        ("--model", ["x.gguf"], "argv"),
        ("--ctx-size", ["4"], "argv"),
        ("--kv-unified", ["0"], "argv"),
        ("--flash-attn", ["on"], "argv"),
    ]


def test_a_secret_is_told_by_its_hash(engine_path: Path, tmp_path: Path) -> None:
    done = asked(engine_path, tmp_path, "--api-key", "s3cret", LLAMA_API_KEY="hidden")
    for secret in ("s3cret", "hidden"):
        assert secret not in done.stdout
        assert f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}" in done.stdout


def test_a_wrong_command_line_is_refused_as_the_server_refuses_it(
    engine_path: Path, tmp_path: Path
) -> None:
    cases = {
        ("--no-such-option",): "invalid argument: --no-such-option",
        ("--ctx-size=4096",): "invalid argument: --ctx-size=4096",
        ("-c", "many"): 'error while handling argument "-c"',
        ("-c",): "expected value for argument",
    }
    for args, words in cases.items():
        done = asked(engine_path, tmp_path, *args)
        assert (done.returncode, done.stdout) == (1, ""), args
        assert words in done.stderr
