"""`llamactl run` as its caller's program: its streams, and which llama-server is meant."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor.models import EngineState
from run_box import COMMAND, SMALL, RunBox, healthy, owner_pid, stopped
from sandbox import WITHIN_S, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def box() -> Iterator[RunBox]:
    box = RunBox()
    box.start()
    yield box
    box.close()


# --- streams and the log -------------------------------------------------------------------------


def test_the_log_comes_on_the_stream_that_it_was_written_to(box: RunBox) -> None:
    shim = box.run(*SMALL, "--fake-flood", "6400").ready()
    until(lambda: shim.out.count("\n") == 100)
    until(lambda: f"llamactl run: listening on {shim.url}\n" in shim.err)
    assert shim.err.count("listening on http") == 1
    assert set(shim.out.splitlines()) == {"flooding " * 7}
    assert "fake engine on" in shim.err
    assert "flooding" not in shim.err


def test_a_reader_that_does_not_read_loses_lines_and_holds_up_nothing(box: RunBox) -> None:
    """The pipe is full, the shim serves and ends; what was dropped is told once somebody reads."""
    command = [*COMMAND, "--", str(box.request().engine_path), "-m", str(box.model), *SMALL]
    port = free_port()
    command += ["--port", str(port), "--fake-flood", str(3 * 2**20)]
    with subprocess.Popen(
        command,
        env=os.environ | box.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=box.root,
    ) as shim:
        assert shim.stdout is not None

        until(lambda: healthy(f"http://127.0.0.1:{port}"))
        read = bytearray()

        def gather() -> None:
            for line in shim.stdout or ():
                read.extend(line)

        reading = threading.Thread(target=gather)
        until(lambda: owner_pid(box) == shim.pid)
        reading.start()
        until(lambda: b"lines were dropped" in read)
        shim.terminate()
        assert shim.wait(WITHIN_S) == 0
        reading.join()
    lines = read.decode().splitlines()
    told = [line for line in lines if "lines were dropped" in line]
    dropped = sum(int(line.split()[2]) for line in told)
    flood = sum(line.startswith("flooding") for line in lines)
    assert told
    assert flood + dropped <= 3 * 2**20 // 64


def test_nothing_of_the_callers_is_kept_open() -> None:
    """The output of a run is read to its end as soon as the run has ended: `x=$(...)` returns."""
    fresh = RunBox()
    try:
        port = free_port()
        line = " ".join(COMMAND) + f" -- {fresh.request().engine_path} -m {fresh.model}"
        script = f'{line} --port {port} -c 8192 & p=$!; sleep() {{ read -t "$1" _ <> <(:); }}; '
        script += f"until curl -sfo /dev/null http://127.0.0.1:{port}/health; do sleep 0.05; done; "
        script += "kill $p; wait $p; echo ended $?"
        done = subprocess.run(
            ["bash", "-c", f'x=$({{ {script} ; }} 2>&1); echo "$x" | tail -1'],
            env=os.environ | fresh.env,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=True,
        )
        assert done.stdout == "ended 0\n"
        assert fresh.client.status().state is EngineState.READY
        for process in fresh.processes():
            for number in (0, 1, 2):
                target = os.readlink(f"/proc/{process.pid}/fd/{number}")  # noqa: PTH115
                assert "pipe" not in target or process.name() != "python", target
    finally:
        fresh.close()


# --- what is no server, and which one is meant ---------------------------------------------------


@pytest.mark.parametrize(
    "args", [("--help",), ("--version",), ("--list-devices",), (), ("-hf", "a/b"), ("-mu", "u")]
)
def test_what_starts_no_engine_is_the_real_ones(
    box: RunBox, tmp_path: Path, args: tuple[str, ...]
) -> None:
    real = tmp_path / "llama-server"
    real.write_text('#!/bin/sh\necho "real: $0 $*"\nexit 9\n')
    real.chmod(0o755)
    for program, path in ((str(real), {}), ("llama-server", {"LLAMACTL_ENGINE_PATH": str(real)})):
        command = [*COMMAND, "--", program, *args]
        env = os.environ | box.env | path
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 9
        assert done.stdout == f"real: {real} {' '.join(args)}\n"
        assert done.stderr.startswith("llamactl run: ")
        assert done.stderr.count("\n") == 1
    assert box.client.status().state is EngineState.STOPPED


@pytest.mark.parametrize("said", ["--hf-repo", "no model is named"])
def test_what_its_own_file_says_of_the_model_is_the_real_ones(
    box: RunBox, tmp_path: Path, said: str
) -> None:
    """Only the engine reads that; nothing is loaded but what it would have loaded itself."""
    options = subprocess.run(
        [box.request().engine_path, "--print-args-json"], capture_output=True, text=True, check=True
    )
    answer = json.loads(options.stdout)
    given = [{"name": "--hf-repo", "values": ["a/b"], "source": "config.ini"}]
    answer["given"] = given if said == "--hf-repo" else []
    real = tmp_path / "llama-server"
    real.write_text(
        f'#!/bin/sh\n[ "$1" = --print-args-json ] && {{ echo {shlex.quote(json.dumps(answer))}; '
        'exit; }\necho "real: $*"\nexit 9\n'
    )
    real.chmod(0o755)
    file = tmp_path / "llama.cpp" / "config.ini"
    file.parent.mkdir()
    file.touch()
    command = [*COMMAND, "--", str(real), "-c", "512"]
    env = os.environ | box.env | {"XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (9, "real: -c 512\n"), done.stderr
    assert said in done.stderr
    assert "-m" in done.stderr
    assert stopped(box)


def test_a_binary_that_is_not_patched_is_refused_or_run_plain(box: RunBox, tmp_path: Path) -> None:
    plain = tmp_path / "llama-server"
    plain.write_text(
        '#!/bin/sh\n[ "$1" = --print-args-json ] && '
        '{ echo "error: invalid argument: --print-args-json" >&2; exit 1; }\n'
        'echo "plain $1"\nexit 4\n'
    )
    plain.chmod(0o755)
    shim = box.run(*SMALL, engine=plain)
    assert shim.process.wait(WITHIN_S) == 1
    assert f"{plain} is no patched llama-server" in shim.err
    assert "--passthrough" in shim.err
    through = box.run(*SMALL, engine=plain, options=["--passthrough"])
    assert through.process.wait(WITHIN_S) == 4
    assert through.out == "plain -m\n"


def test_a_bare_name_is_the_engine_that_the_daemon_knows(box: RunBox) -> None:
    assert box.run(*SMALL).ready().end() == 0
    pid = box.engine_pid()
    command = [*COMMAND, "--", "llama-server", "-m", str(box.model), *SMALL]
    port = free_port()
    with subprocess.Popen(
        [*command, "--port", str(port)], env=os.environ | box.env, cwd=box.root
    ) as shim:
        until(lambda: owner_pid(box) == shim.pid)
        assert box.engine_pid() == pid
        shim.terminate()
