"""`llamactl run` where it fails itself: its words, its exit codes, and who is declined."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import httpx
import pytest
from run_box import COMMAND, RunBox
from sandbox import WITHIN_S

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[RunBox]:
    box = RunBox()
    box.start()
    yield box
    box.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--linger", "soon", "--", "llama-server"], "--linger takes seconds"),
        (["--linger"], "--linger needs a value"),
        (["--instance", "../x", "--", "llama-server"], "--instance takes a name"),
        (["--wrong", "--", "llama-server"], "no such option: --wrong"),
        ([], "there is no command to run"),
        (["--", "llama-server", "-m", "x", "--host", "x.sock"], "no unix socket (`llamactl env`"),
    ],
)
def test_our_own_failures_end_with_125(words: list[str], said: str) -> None:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert said in done.stderr
    assert done.stderr.startswith("llamactl run: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "eighty"], "--port 'eighty' is no port"),
        (["--port", "99999"], "--port '99999' is no port"),
        (["--host", "no.such.invalid", "--port", "8080"], "no.such.invalid:8080 cannot be bound"),
    ],
)
def test_an_address_that_is_none_ends_with_llama_servers_own_code(
    words: list[str], said: str
) -> None:
    command = [*COMMAND, "--", "llama-server", "-m", "x", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr


def test_help_is_help() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: llamactl run [OPTIONS] -- llama-server ARGS...")


def test_a_run_is_no_request_for_a_stranger(box: RunBox) -> None:
    """Over HTTP what is no run request is declined before anything is done."""
    transport = httpx.HTTPTransport(uds=str(box.paths.control_socket))
    with httpx.Client(transport=transport, timeout=WITHIN_S) as client:
        answer = client.post("http://llamactl/v1/run", json={"argv": []})
    assert answer.status_code == 400
    assert answer.json()["code"] == "invalid_request"
