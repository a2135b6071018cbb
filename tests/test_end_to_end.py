"""The main job as a person does it: `up`, a stream, a `reconfigure` under it, `down`.

The real engine on the default model, through the real command. Directories and port are the test's
own; engine and model come from the cache that `up` uses.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from cli_home import COMMAND
from live_engine import PATIENT_THREADS
from sandbox import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMMAND_TIMEOUT_S = 120.0
DELTAS_BEFORE = 10
"""Deltas of the stream that have arrived before the command is run."""
TRIES = 3
"""A command that ends after the stream says nothing: that run is taken again."""
STORY = "Once upon a time there was a lighthouse keeper who kept a fox. Every evening"
CHAT = {
    "messages": [{"role": "user", "content": "Write a story about a lighthouse keeper."}],
    "max_tokens": 160,
    "temperature": 0,
    "ignore_eos": True,
    # Every run processes the whole prompt, so that all of them compute the same.
    "cache_prompt": False,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@dataclass(frozen=True)
class Stream:
    """A streamed answer."""

    text: str
    n_prompt: int
    n_generated: int
    last_line: str


class Shell:
    """Runs the command as a shell does, each time as a process of its own."""

    def __init__(self, root: Path) -> None:
        self.runtime = root / "r"
        self.pages = root / "s" / "pages"
        self.model = root / "damaged.gguf"
        self.port = free_port()
        self.n_reconfigured = 0
        self.env = (
            os.environ
            | PATIENT_THREADS
            | {
                "LLAMACTL_STATE_DIR": str(root / "s"),
                "LLAMACTL_RUNTIME_DIR": str(self.runtime),
            }
        )

    def run(self, *words: str) -> Any:
        """Run `llamactl words --json`; return what it printed."""
        done = self._run(*words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def fail(self, *words: str) -> tuple[int, Any]:
        """Run `llamactl words --json`; return the exit code and the error."""
        done = self._run(*words)
        assert done.returncode != 0, done.stdout
        assert done.stdout == ""
        return done.returncode, json.loads(done.stderr)["error"]

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, "--json", *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )

    def get(self, path: str) -> Any:
        """Ask the engine on its public port."""
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.get(url, timeout=COMMAND_TIMEOUT_S).raise_for_status().json()

    def complete(self, prompt: str, slot: int, n_predict: int) -> Any:
        """Answer a prompt in the slot; return the engine's answer."""
        url = f"http://127.0.0.1:{self.port}/completion"
        wanted = {"prompt": prompt, "id_slot": slot, "n_predict": n_predict, "temperature": 0}
        answer = httpx.post(url, json=wanted, timeout=COMMAND_TIMEOUT_S)
        return answer.raise_for_status().json()

    def stream(self, meanwhile: Callable[[], None] = lambda: None) -> Stream:
        """Stream the chat to its end; `meanwhile` runs after the first deltas."""
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        deltas: list[str] = []
        usage: dict[str, int] = {}
        line = ""
        with httpx.stream("POST", url, json=CHAT, timeout=COMMAND_TIMEOUT_S) as answer:
            answer.raise_for_status()
            for line in filter(None, answer.iter_lines()):
                if line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    deltas += filter(None, [choice["delta"].get("content")])
                    if len(deltas) == DELTAS_BEFORE:
                        meanwhile()
                        meanwhile = _nothing
        return Stream("".join(deltas), usage["prompt_tokens"], usage["completion_tokens"], line)

    def reconfigure_under_a_stream(self, n_ctx: int, n_seq: int) -> tuple[Stream, Any]:
        """Change the geometry in the middle of a stream; return both ends of the story."""
        before = self.get("/props")["context_geometry"]
        receipts: list[Any] = []
        for _ in range(TRIES):
            stream = self.stream(
                lambda: receipts.append(self._reconfigure(n_ctx=n_ctx, n_seq=n_seq))
            )
            (held,) = receipts[-1]["slots"]
            if held["tokens"] < stream.n_prompt + stream.n_generated - 1:
                assert held["tokens"] >= stream.n_prompt + DELTAS_BEFORE - 1
                return stream, receipts[-1]
            self._reconfigure(n_ctx=before["n_ctx"], n_seq=before["n_seq"])
        raise AssertionError(f"no change came before the stream's end: {receipts}")

    def _reconfigure(self, *, n_ctx: int, n_seq: int) -> Any:
        self.n_reconfigured += 1
        return self.run("reconfigure", "--n-ctx", str(n_ctx), "--n-seq", str(n_seq))


def _nothing() -> None:
    """Do nothing."""


def runs(pid: int) -> bool:
    """Whether the process does anything any more, reaped by whoever adopted it or not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def shell(engine_path: Path, model_path: Path) -> Iterator[Shell]:
    assert engine_path.is_file()
    assert model_path.is_file()
    # Not pytest's tmp_path: the path of a socket may have 107 bytes only.
    root = Path(tempfile.mkdtemp(prefix="llamactl-"))
    shell = Shell(root)
    try:
        yield shell
    finally:
        shell.run("down")
        shutil.rmtree(root)


def test_a_context_grows_and_shrinks_under_a_stream_without_a_weight_being_reloaded(
    shell: Shell,
) -> None:
    up = shell.run("up", "--port", str(shell.port))
    assert (up["outcome"], up["daemon_started"]) == ("started", True)
    first = {"n_ctx": 16384, "n_seq": 2}
    assert up["geometry"] | first == up["geometry"]

    control = shell.stream()
    assert control.n_generated == CHAT["max_tokens"]
    assert shell.stream() == control

    grown, receipt = shell.reconfigure_under_a_stream(n_ctx=131072, n_seq=4)
    assert grown == control
    assert grown.last_line == "data: [DONE]"
    assert receipt["outcome"] == "applied"
    assert receipt["previous"] | first == receipt["previous"]
    assert (receipt["geometry"]["n_ctx"], receipt["geometry"]["n_seq"]) == (131072, 4)
    assert receipt["n_weight_loads"] == 1
    assert receipt["pause_ms"] > 0
    props = shell.get("/props")
    assert (props["total_slots"], props["n_weight_loads"]) == (4, 1)
    status = shell.run("status")
    assert status["state"] == "ready"
    assert status["engine"]["pid"] == up["pid"]
    assert status["engine"]["geometry"] == receipt["geometry"]
    assert status["engine"]["last_reconfigure"] == receipt
    assert (status["weight_loads"], status["loads_avoided"]) == (1, shell.n_reconfigured)
    assert status["drift"]["n_seq"] == {"asked": 2, "live": 4}
    held = [slot["n_prompt_tokens"] for slot in status["holds"]["slots"]]
    assert len(held) == 4
    assert max(held) > grown.n_generated
    memory = status["memory"]
    parts = ("weights_bytes", "files_bytes", "pages_bytes", "contexts_bytes")
    assert sum(memory[part] for part in parts) == memory["resident_bytes"]
    assert 0.5 < memory["weights_bytes"] / Path(up["model"]).stat().st_size <= 1.01
    assert memory["full_contexts_bytes"] == receipt["bytes_needed"]
    assert [pause["pause_ms"] for pause in status["pauses"]] == [receipt["pause_ms"]]

    shrunk, receipt = shell.reconfigure_under_a_stream(**first)
    assert shrunk == control
    assert receipt["geometry"] == up["geometry"]
    assert receipt["n_weight_loads"] == 1
    assert shell.get("/props")["total_slots"] == 2
    assert shell.run("status")["engine"]["pid"] == up["pid"]

    assert shell.run("down")["outcome"] == "stopped"
    assert not runs(up["pid"])
    assert not runs(up["daemon_pid"])
    assert [path for path in shell.runtime.rglob("*") if path.is_socket()] == []
    with pytest.raises(httpx.ConnectError):
        shell.get("/health")


def test_what_the_engine_refuses_ends_the_command_with_its_reason(shell: Shell) -> None:
    pid = shell.run("up", "--port", str(shell.port))["pid"]
    before = shell.get("/props")
    code, error = shell.fail("reconfigure", "--n-ctx", "2000000000")
    assert (code, error["code"]) == (5, "insufficient_memory")
    assert error["details"]["bytes_needed"] > error["details"]["bytes_available"] > 0
    code, error = shell.fail("up", "--port", str(shell.port), "--n-seq", "3")
    assert (code, error["code"]) == (5, "conflict")
    again = shell.run("up", "--port", str(shell.port))
    assert (again["outcome"], again["pid"]) == ("already_up", pid)
    assert shell.get("/props") == before
    shell.run("stop")
    code, error = shell.fail("reconfigure", "--n-ctx", "32768")
    assert (code, error["code"]) == (3, "engine_stopped")


def test_a_conversation_goes_through_files_into_another_slot_of_another_engine(
    shell: Shell, engine_path: Path
) -> None:
    """Out, spilled and dropped; the engine is started again, and the conversation goes on."""
    shell.run("up", "--port", str(shell.port), "--engine", str(engine_path))
    tale = STORY + shell.complete(STORY, 0, 16)["content"]
    held = shell.run("pages", "out", "0", "fox")
    spilled = shell.run("pages", "spill", "fox", "--to", "tale", "--drop")
    assert (spilled["page"], spilled["filename"], spilled["dropped"]) == ("fox", "tale", True)
    assert spilled["n_tokens"] == held["n_tokens"]
    assert spilled["n_written"] > spilled["n_bytes"] > 0
    assert shell.run("pages", "ls")["pages"] == []
    assert shell.pages.stat().st_mode & 0o777 == 0o700
    files = [shell.pages / name for name in ("tale", "tale.ckpt")]
    assert sum(file.stat().st_size for file in files) == spilled["n_written"]

    shell.run("restart")
    back = shell.run("pages", "restore", "tale", "1")
    assert (back["id_slot"], back["lost"]) == (1, [])
    assert back["n_restored"] == back["n_reusable"] == held["n_tokens"]
    assert back["n_read"] == spilled["n_written"]
    assert shell.complete(tale, 1, 8)["timings"]["cache_n"] >= held["n_tokens"] - 1

    saved = shell.run("pages", "save", "1", "tale")
    assert saved["n_saved"] == saved["n_tokens"] > held["n_tokens"]
    files[1].unlink()
    (lost,) = shell.run("pages", "restore", "tale", "0")["lost"]
    assert lost["file"] == "tale.ckpt"
    for words, code in (
        (("restore", "absent", "0"), "no_file"),
        (("save", "0", "../tale"), "bad_name"),
        (("spill", "fox"), "unknown_page"),
    ):
        exit_code, error = shell.fail("pages", *words)
        assert (exit_code, error["code"]) == (5, code)


def test_a_damaged_model_ends_up_with_the_engines_last_words(
    shell: Shell, model_path: Path
) -> None:
    with model_path.open("rb") as whole:
        shell.model.write_bytes(whole.read(2**20))
    code, error = shell.fail("up", "--port", str(shell.port), "--model", str(shell.model))
    assert (code, error["code"]) == (1, "engine_exited")
    assert "failed to load model" in "\n".join(error["details"]["last_lines"])


def test_an_engine_that_aborts_says_why_last(shell: Shell) -> None:
    """Nothing comes after it: no debugger prints a stack, not even where there is one."""
    words = ("--per-slot", "256", "-np", "3", "--", "-b", "1", "-ub", "1")
    code, error = shell.fail("up", "--port", str(shell.port), *words)
    assert (code, error["code"]) == (1, "engine_exited")
    assert "GGML_ASSERT" in error["details"]["last_lines"][-1]
    assert "SIGABRT" in error["message"]
