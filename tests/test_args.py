"""What is made of an engine's answer about its own options, and of one that is no answer."""

from __future__ import annotations

import os
import resource
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_supervisor import args
from llamactl_supervisor.errors import LlamactlError
from sandbox import until

if TYPE_CHECKING:
    from pathlib import Path

OPTION = '{"name":"-x","args":["-x"],"args_neg":[],"env":null,"arity":0,"class":"model"}'


def script(tmp_path: Path, body: str) -> str:
    engine = tmp_path / "engine"
    engine.write_text(f"#!/bin/sh\n{body}\n")
    engine.chmod(0o700)
    return str(engine)


def refused(engine: str) -> LlamactlError:
    with pytest.raises(LlamactlError) as caught:
        args.ask([engine, "-x"], {"PATH": os.environ["PATH"]})
    return caught.value


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("echo 'error: invalid argument: --print-args-json' >&2; exit 1", "not_supported", "know"),
        ("exit 0", "engine_answer_broken", "Invalid JSON"),
        ('echo \'{"build":"b","options":[],"given":[]}\'', "engine_answer_broken", "options"),
        (f'echo \'{{"build":7,"options":[{OPTION}],"given":[]}}\'', "engine_answer_broken", "b"),
        ("printf '\\377\\000'", "engine_answer_broken", "Invalid JSON"),
        ("yes", "engine_answer_broken", "more than 4194304 bytes"),
        ("yes >&2", "engine_answer_broken", "more than 4194304 bytes"),
        ("echo 'error: invalid argument: -x' >&2; exit 1", "engine_spawn_failed", "argument: -x"),
        ("kill -9 $$", "engine_spawn_failed", "ended with status -9"),
    ],
)
def test_what_is_no_answer_is_a_clear_error(
    tmp_path: Path, body: str, code: str, words: str
) -> None:
    problem = refused(script(tmp_path, body))
    assert problem.code == code
    assert words in problem.message


def ended(pid: int) -> bool:
    """Whether the process is gone, or dead and waited for by nobody."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    "body",
    [
        "echo $$ > pid; exec sleep 60",
        "sleep 60 & echo $! > pid",
        "echo $$ > pid; exec >&- 2>&-; exec sleep 60",
    ],
)
def test_who_does_not_end_is_ended(
    tmp_path: Path, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(args, "PARSE_S", 0.5)
    pid = tmp_path / "pid"
    assert refused(script(tmp_path, body.replace("pid", str(pid)))).code == "timed_out"
    until(lambda: ended(int(pid.read_text())))


@pytest.mark.parametrize("name", ["there-is-none", "a\0b"])
def test_what_cannot_be_run_says_so(tmp_path: Path, name: str) -> None:
    problem = refused(str(tmp_path / name))
    assert problem.code == "engine_spawn_failed"
    assert problem.hint is not None
    assert problem.hint.startswith("check the path")


def test_what_is_another_program_is_asked_about() -> None:
    problem = refused("/bin/true")
    assert problem.hint is not None
    assert problem.hint.startswith("is it a llama-server?")


def test_what_does_not_fit_is_no_matter_of_the_command_line(tmp_path: Path) -> None:
    """The engine's own words, in the unit that the daemon's have."""
    said = "a context of 9000000000 tokens takes 128000000000 bytes, 22970863616 are available"
    engine = script(tmp_path, f"echo '0.00.1 E srv  server_memor: {said}' >&2; exit 1")
    with pytest.raises(LlamactlError) as caught:
        args.memory([engine], os.environ)
    assert caught.value.message == (
        "the engine would not load this: a context of 9000000000 tokens takes 122070 MiB, "
        "21906 MiB are available"
    )
    assert caught.value.hint == "-c and -np say how much it is to hold"


def test_the_options_are_asked_once_of_each_binary(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    answer = f'{{"build":"b","options":[{OPTION}],"given":[]}}'
    engine = script(tmp_path, f"echo >> {asked}\necho '{answer}'")
    for _ in range(3):
        assert [option.name for option in args.options(engine, {})] == ["-x"]
    assert asked.read_text() == "\n"
    script(tmp_path, f"echo >> {asked}\necho '{answer.replace('-x', '-longer')}'")
    assert [option.name for option in args.options(engine, {})] == ["-longer"]


def test_the_real_engine_says_what_it_has(engine_path: Path, tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path), "LLAMA_ARG_THREADS": "3"}
    answer = args.ask([str(engine_path), "-c", "4k"], env)
    assert answer.last("--ctx-size") == "4"
    assert answer.last("--threads") == "3"
    assert answer.last("--parallel") is None
    assert answer.classes["--ctx-size"] == "live"
    assert len(args.options(str(engine_path), env)) > 150


def test_it_refuses_a_value_behind_an_equals_sign_and_so_do_we(engine_path: Path) -> None:
    with pytest.raises(LlamactlError, match="invalid argument: --ctx-size=4096"):
        args.ask([str(engine_path), "--ctx-size=4096"], {})


def test_a_process_that_cannot_be_started_now_is_no_fault_of_its_program() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(LlamactlError) as caught:
            args.ask([sys.executable], {})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.code == "out_of_resources"
    assert "could not be run now" in caught.value.message
