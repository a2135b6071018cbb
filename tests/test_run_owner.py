"""The shim's loop against a daemon that answers line by line."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from llamactl_cli.run import daemon, owner, places, words
from sandbox import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

UNKNOWN = {"event": "refused", "problem": {"code": "engine_unknown", "message": "which?"}}
EXIT = {"event": "exit", "code": 7, "signal": None, "text": ""}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Not pytest's tmp_path: the path of a socket below it may have 107 bytes only.
    root = Path(tempfile.mkdtemp(prefix="llamactl-"))
    monkeypatch.setenv("LLAMACTL_RUNTIME_DIR", str(root))
    yield root
    shutil.rmtree(root)


def test_a_daemon_that_knows_no_engine_is_asked_again_with_the_one_that_is_built(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first answer ends with the refusal, which is no daemon that has ended."""
    monkeypatch.setattr(places, "built_engine", lambda _: "/engines/llama-server")
    answers, programs = [UNKNOWN, EXIT], []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        programs.append(json.loads(await reader.readexactly(length))["engine_path"])
        line = json.dumps(answers.pop(0)).encode() + b"\n"
        chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(line), line)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def run() -> owner.End:
        async with await asyncio.start_unix_server(answer, runtime / "control.sock"):
            asked = words.Words("llama-server", ("-m", "m.gguf", "--port", str(free_port())))
            return await owner.Owner(asked).run()

    assert asyncio.run(run()) == owner.End(7)
    assert programs == [None, "/engines/llama-server"]


def test_a_daemon_that_does_not_answer_is_given_up(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever of it was awaited: the port is held by a socket that nobody reads from."""
    for name, value_s in (("LOOK_S", 0.01), ("SILENT_S", 0.1), ("GIVE_UP_S", 0.5)):
        monkeypatch.setattr(daemon, name, value_s)

    async def run() -> owner.End:
        asked = words.Words("llama-server", ("-m", "m.gguf", "--port", str(free_port())))
        return await owner.Owner(asked).run()

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(runtime / "control.sock"))
        silent.listen()
        assert asyncio.run(run()) == owner.End(125)
    said = capfd.readouterr().err.splitlines()
    assert [line.endswith("does not answer") for line in said] == [False, True]
    assert all(f"the daemon behind {runtime}/control.sock" in line for line in said)
