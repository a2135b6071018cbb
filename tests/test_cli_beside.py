"""Commands that need little of a daemon or of a configuration go on without the rest of it."""

from __future__ import annotations

import json
import os
import signal
import socketserver
import subprocess
import threading
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil
import pytest
from cli_home import Home, fresh_home
from llamactl_supervisor import remains

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


@pytest.fixture
def broken(home: Home) -> Iterator[Path]:
    """A file that is no TOML, in a home whose cache directory is the default one."""
    home.up()
    file = home.root / "config" / "llamactl" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[engine\n")
    chosen = {"XDG_CACHE_HOME": str(home.root / "xdg"), "LLAMACTL_CACHE_DIR": ""}
    with mock.patch.dict(os.environ, chosen):
        yield file


@pytest.mark.parametrize(
    ("words", "code"),
    [
        *((("status",), 0), (("logs", "-n", "1"), 0), (("ledger",), 0), (("orphans",), 0)),
        *((("orphans", "--end"), 0), (("logs",), 0), (("config", "check"), 2)),
        *((("env",), 0), (("version",), 0), (("wait",), 0), (("start",), 0), (("stop",), 0)),
        *((("down",), 0), (("up", "--model", "/m"), 2), (("config", "show"), 2)),
    ],
)
def test_what_only_needs_the_directories_goes_on(
    home: Home, broken: Path, words: tuple[str, ...], code: int
) -> None:
    ran = home.run(*words)
    assert ran.code == code, ran
    assert ran.err.count(f"file {broken}: is no TOML") == 1


@pytest.mark.parametrize("broken_too", [False, True])
def test_what_a_dead_daemon_left_is_ended_whatever_is_configured(
    home: Home, broken: Path, *, broken_too: bool
) -> None:
    """With the environment's patience, else the default's."""
    daemon = psutil.Process(home.run("status", "--json").result["daemon"]["pid"])
    daemon.kill()
    daemon.wait(10)
    [pid] = remains.engine_pids(home.paths)
    said = [f"file {broken}: is no TOML"]
    if broken_too:
        os.environ["LLAMACTL_STOP_TERM_S"] = "soon"
        said.append("LLAMACTL_STOP_TERM_S")
    ran = home.run("orphans", "--end")
    os.environ["LLAMACTL_STOP_TERM_S"] = "1"
    assert (ran.code, remains.engine_pids(home.paths)) == (0, [])
    assert f"pid {pid}" in ran.out
    assert [ran.err.count(words) for words in said] == [1] * len(said)


def test_json_is_not_disturbed(home: Home, broken: Path) -> None:
    assert broken.exists()
    assert home.run("status", "--json").result["state"] == "ready"


def test_the_doctor_finds_the_broken_file_and_goes_on(home: Home, broken: Path) -> None:
    ran = home.run("doctor", "--json")
    found = {finding["check"]: finding for finding in ran.result["findings"]}
    assert (ran.code, found["configuration"]["level"]) == (1, "fail")
    assert str(broken) in found["configuration"]["found"]
    assert found["daemon"]["level"] == "ok"


class Stranger(BaseHTTPRequestHandler):
    """A daemon of a version that says everything in another way."""

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def address_string(self) -> str:
        """Have none."""
        return "unix"

    def do_GET(self) -> None:
        """Say who we are."""
        status = {"daemon": {"pid": self.server.pid, "version": "99.0"}, "newer": 1}  # type: ignore[attr-defined]
        self._answer(status | {"desired": {"engine_path": "/e", "newer": 1}})

    def do_POST(self) -> None:
        """End what passes for us."""
        self._answer({"id": "x", "newer": 1})
        os.kill(self.server.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    def _answer(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """On the control socket."""

    daemon_threads = True


@pytest.fixture
def other(home: Home) -> Iterator[Home]:
    home.paths.runtime.mkdir(mode=0o700)
    with (
        subprocess.Popen(["sleep", "300"]) as process,
        Server(str(home.paths.control_socket), Stranger) as server,
    ):
        server.pid = process.pid  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield home
        server.shutdown()
        thread.join()
        process.kill()
        home.paths.control_socket.unlink()


def test_a_daemon_of_another_version_can_be_ended_and_named(other: Home) -> None:
    told = other.run("status")
    assert told.code == 1
    assert "llamactl down" in told.err
    said = json.loads(other.run("version", "--json").out)
    assert (said["daemon"], said["engine_path"]) == ("99.0", "/e")
    env = other.run("env")
    assert (env.code, "of this version" in env.err) == (0, True)
    assert f"LLAMACTL_RUNTIME_DIR={other.paths.runtime}" in env.out
    assert other.run("down").out == "engine stopped\n"
