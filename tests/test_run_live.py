"""`llamactl run` with the real engine: what its callers and their conversations see."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from llamactl_supervisor.models import EngineState
from orchestrators import Entry, LlamaSwap
from run_box import COMMAND, QUICK, LiveBox, healthy, told
from sandbox import WITHIN_S, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SMALL = ("-c", "8192", "-np", "2")
LARGE = ("-c", "16384", "-np", "3")
STORY = "Once upon a time a fox and a hen lived in a wood. " * 8
TIMES = 4


@pytest.fixture
def box(engine_path: Path, model_path: Path) -> Iterator[LiveBox]:
    box = LiveBox(engine_path, model_path, linger_s=60, probe_s=1)
    box.start()
    yield box
    box.close()


def slots(url: str) -> Any:
    return httpx.get(f"{url}/slots", timeout=WITHIN_S).json()


def test_an_alternation_is_one_load_and_keeps_both_conversations(box: LiveBox) -> None:
    """Every turn reads only what is new, whatever the command line said in between."""
    talks = [f"{STORY} The fox said:", f"A tale of a hen. {STORY}"]
    for number in range(TIMES):
        shim = box.live(*(SMALL, LARGE)[number % 2]).ready()
        assert shim.props()["total_slots"] == (2, 3)[number % 2]
        for which, talk in enumerate(talks):
            answer = told(shim.url, talk)
            if number:
                assert answer["timings"]["prompt_n"] < 12, answer["timings"]
            talks[which] = f"{talk}{answer['content']} And"
        assert shim.end() == 0
    assert box.loads() == ["run"]
    pauses = [line for line in box.ledger() if line.kind == "avoided"]
    assert len(pauses) == TIMES - 1
    assert all(line.pause_ms > 0 for line in pauses)
    assert all(line.tokens_held > 100 for line in pauses)


def test_two_entries_of_llama_swap_are_one_load(box: LiveBox) -> None:
    def entry(*args: str) -> Entry:
        port = free_port()
        server = (str(box.engine), "-m", str(box.weights), *QUICK, "--port", str(port), *args)
        return Entry((*COMMAND, "--", *server), port)

    entries = {"short": entry("-c", "2048"), "long": entry("-c", "8192")}
    swap = LlamaSwap(entries, os.environ | box.env, box.root)
    try:
        for name, n_ctx in (("short", 2048), ("long", 8192), ("short", 2048)):
            props = swap.ask(name).raise_for_status().json()
            assert props["context_geometry"]["n_ctx"] == n_ctx
            assert props["context_geometry"]["kv_unified"] is True
        assert box.loads() == ["run"]
        assert not any(each.killed for each in entries.values())
    finally:
        swap.close()


def test_a_key_on_the_command_line_is_asked_for_and_shown_nowhere(box: LiveBox) -> None:
    shim = box.live(*SMALL, "--api-key", "hunter2").ready()
    body = {"prompt": "x", "n_predict": 1}
    refused = httpx.post(f"{shim.url}/completion", json=body, timeout=WITHIN_S)
    assert refused.status_code == 401
    assert told(shim.url, "x", 1, Authorization="Bearer hunter2")["tokens_predicted"] == 1
    shown = box.client.status().model_dump_json() + box.daemon_log() + shim.err + shim.out
    assert "hunter2" not in shown


def test_the_engines_words_about_its_command_line_are_the_callers(box: LiveBox) -> None:
    shim = box.live(*SMALL, "--ctx-size=4096")
    assert shim.process.wait(WITHIN_S) == 1
    assert "invalid argument: --ctx-size=4096" in shim.err
    gone = box.run("-m", str(box.root / "gone.gguf"), engine=box.engine)
    assert gone.process.wait(WITHIN_S) == 1
    assert "gone.gguf" in gone.err


def test_what_the_environment_says_counts(box: LiveBox) -> None:
    asked = {"CTX_SIZE": "4096", "N_PARALLEL": "1", "THREADS": "1"}
    env = {f"LLAMA_ARG_{name}": value for name, value in asked.items()}
    shim = box.live(env=env).ready()
    geometry = shim.props()["context_geometry"]
    assert (geometry["n_ctx"], geometry["n_seq"]) == (4096, 1)
    assert shim.end() == 0
    shim = box.live("-c", "2048", "-np", "1", "-t", "1").ready()
    assert shim.props()["context_geometry"]["n_ctx"] == 2048
    assert box.loads() == ["run"]


def test_layers_for_a_gpu_that_is_none_linger_like_any(box: LiveBox) -> None:
    """This build has no device but the processor: the weights are in host memory."""
    shim = box.live(*SMALL, "-ngl", "99").ready()
    owner = box.client.status().owner
    assert owner is not None
    assert owner.linger_s == 60
    assert shim.end() == 0


def own_file(home: Path, *lines: str) -> dict[str, str]:
    """Write llama-server's own configuration file; return the environment that names it."""
    file = home / "llama.cpp" / "config.ini"
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join([*lines, ""]))
    return {"XDG_CONFIG_HOME": str(home)}


def test_what_llama_servers_own_file_says_of_address_and_model_counts(
    box: LiveBox, tmp_path: Path
) -> None:
    """The shim listens where llama-server would, also after an edit, and on another it does not."""
    ports = [free_port(), free_port()]
    model, host = f"model = {box.weights}", "host = 127.0.0.2"
    command = [*COMMAND, "--", str(box.engine), *QUICK, *SMALL]
    for port in ports:
        env = os.environ | box.env | own_file(tmp_path, model, host, f"port = {port}")
        with subprocess.Popen(command, env=env, cwd=box.root) as shim:
            until(partial(healthy, f"http://127.0.0.2:{port}"))
            assert not healthy("http://127.0.0.1:8080")
            owner = box.client.status().owner
            assert owner is not None
            assert (owner.pid, owner.host, owner.port) == (shim.pid, "127.0.0.2", port)
            shim.terminate()
            assert shim.wait(WITHIN_S) == 0
    assert box.loads() == ["run"]


def test_the_environment_says_of_address_and_model_what_the_file_does_not(
    box: LiveBox, tmp_path: Path
) -> None:
    port = free_port()
    own = own_file(tmp_path, "port = 1", "host = 127.0.0.2", "model = /nowhere.gguf")
    named = {"LLAMA_ARG_PORT": str(port), "LLAMA_ARG_HOST": "127.0.0.1"}
    named |= {"LLAMA_ARG_MODEL": str(box.weights)}
    command = [*COMMAND, "--", str(box.engine), *QUICK, *SMALL]
    with subprocess.Popen(command, env=os.environ | box.env | own | named, cwd=box.root) as shim:
        until(partial(healthy, f"http://127.0.0.1:{port}"))
        shim.terminate()
        assert shim.wait(WITHIN_S) == 0


def test_a_socket_in_llama_servers_own_file_is_refused(box: LiveBox, tmp_path: Path) -> None:
    shim = box.live(*SMALL, env=own_file(tmp_path, f"host = {tmp_path}/x.sock"))
    assert shim.process.wait(WITHIN_S) == 125
    assert "no unix socket" in shim.err
    assert shim.err.count("\n") == 1
    assert box.client.status().state is EngineState.STOPPED
