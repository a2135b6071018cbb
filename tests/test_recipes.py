"""The recipes of `docs/recipes`: what stands there is what is run, with other paths."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from orchestrators import Entry, LlamaSwap
from run_box import COMMAND, RunBox, healthy
from sandbox import FAKE_ENGINE, WITHIN_S, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
MODEL = "/models/model.gguf"
HANGS_S = 8 * WITHIN_S
"""What takes longer on the busiest machine does not end at all."""


@pytest.fixture
def box() -> Iterator[RunBox]:
    box = RunBox()
    box.start()
    yield box
    box.close()


def here(box: RunBox, line: str, port: int) -> list[str]:
    """Return the words of a recipe's command line as they have to be on this machine."""
    line = line.replace(MODEL, str(box.model)).replace("${PORT}", str(port))
    words = shlex.split(re.sub(r"--port 8080\b", f"--port {port}", line))
    assert words[0] == "llamactl"
    assert words[1] == COMMAND[-1]
    assert "llama-server" in words
    return [*COMMAND[:-1], *(str(FAKE_ENGINE) if w == "llama-server" else w for w in words[1:])]


def ini(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(RECIPES / name)
    return parser


def restarted(box: RunBox, line: str) -> None:
    """Run the line, then what somebody has edited it to, as its manager would."""
    port = free_port()
    for n_ctx in (8192, 16384):
        words = here(box, line.replace("-c 8192", f"-c {n_ctx}"), port)
        with subprocess.Popen(words, env=os.environ | box.env, cwd=box.root) as server:
            until(lambda: healthy(f"http://127.0.0.1:{port}"))
            assert geometry(port)["n_ctx"] == n_ctx
            server.terminate()
            assert server.wait(WITHIN_S) == 0
    assert box.loads() == ["run"]


def geometry(port: int) -> Any:
    answer = httpx.get(f"http://127.0.0.1:{port}/props", timeout=WITHIN_S)
    return answer.json()["context_geometry"]


def test_every_recipe_is_tested() -> None:
    names = {path.name for path in RECIPES.iterdir()}
    assert names == {"llama-swap.yaml", "llama-server.service", "supervisord.conf", "loop.sh"}


def test_llama_swap(box: RunBox) -> None:
    models = yaml.safe_load((RECIPES / "llama-swap.yaml").read_text())["models"]
    entries = {}
    for name, model in models.items():
        port = free_port()
        entries[name] = Entry(tuple(here(box, model["cmd"], port)), port)
    swap = LlamaSwap(entries, os.environ | box.env, box.root)
    try:
        for name, n_ctx in (("model-8k", 8192), ("model-32k", 32768), ("model-8k", 8192)):
            assert swap.ask(name).json()["context_geometry"]["n_ctx"] == n_ctx
        assert box.loads() == ["run"]
    finally:
        swap.close()


def test_a_unit_of_systemd(box: RunBox) -> None:
    service = ini("llama-server.service")["Service"]
    assert service["RestartPreventExitStatus"] == "125"
    restarted(box, service["ExecStart"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (RECIPES / "llama-server.service").read_text()
    text = text.replace("ExecStart=llamactl", f"ExecStart={sys.executable}")
    (tmp_path / "llama-server.service").write_text(text)
    (tmp_path / "llamactl.socket").write_text("[Socket]\nListenStream=/run/x.sock\n")
    (tmp_path / "llamactl.service").write_text("[Service]\nExecStart=/bin/true\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))],
        env=os.environ | {"SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "llama-server.service" not in done.stderr, done.stderr


def test_supervisord(box: RunBox) -> None:
    program = ini("supervisord.conf")["program:llama-server"]
    assert program["stopsignal"] == "TERM"
    restarted(box, program["command"])


def loop(box: RunBox, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the loop of the recipe with the fake engine, `options` of it among its arguments."""
    beside = box.root / "bin"
    beside.mkdir()
    (beside / "llamactl").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND[:-1])} "$@"\n')
    (beside / "llamactl").chmod(0o755)
    server = shlex.join(["--", str(FAKE_ENGINE), *options])
    script = (RECIPES / "loop.sh").read_text().replace("-- llama-server", server)
    return subprocess.run(
        ["sh", "-c", script, "loop.sh", str(box.model), str(free_port())],
        env=os.environ | box.env | {"PATH": f"{beside}:{os.environ['PATH']}"},
        cwd=box.root,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
    )


def test_a_loop(box: RunBox) -> None:
    done = loop(box)
    assert done.returncode == 0, (done.stderr, (box.root / "llama-server.log").read_text())
    found = re.findall(r'"context_geometry": {"n_ctx": (\d+)', done.stdout)
    assert found == ["8192", "16384", "32768"]
    assert box.loads() == ["run"]


def test_a_loop_does_not_wait_for_a_server_that_has_ended(box: RunBox) -> None:
    assert loop(box, "--fake-load-exit", "3").returncode == 3
