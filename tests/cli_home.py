"""A home of its own for the command under test: directories, a free port, a fake engine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from llamactl_cli import interrupts
from llamactl_cli.main import main
from llamactl_supervisor import remains
from llamactl_supervisor.config import Paths, mistyped
from llamactl_supervisor.errors import ExitCode
from sandbox import FAKE_ENGINE, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COMMAND = (sys.executable, "-m", "llamactl_cli")
GGUF_HEAD = b"GGUF\x03\x00\x00\x00" + bytes(16)


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it wrote where."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> Any:
        """The JSON on stdout; nothing else may be there, and nothing on stderr."""
        assert self.err == ""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The JSON error on stderr; nothing may be on stdout."""
        assert self.out == ""
        problem = json.loads(self.err)
        assert list(problem) == ["error"]
        assert list(problem["error"]) == ["code", "message", "hint", "details"]
        return problem["error"]

    @property
    def rows(self) -> dict[str, str]:
        """The table on stdout by its first column."""
        pairs = (line.split("  ", 1) for line in self.out.splitlines())
        return {pair[0]: pair[-1].strip() for pair in pairs if pair[0]}


class Home:
    """Runs commands against directories of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = Paths(root / "cache", root / "state", root / "run")
        self.model = root / "model.gguf"
        self.model.write_bytes(GGUF_HEAD)
        self.port = free_port()

    def run(self, *words: str) -> Ran:
        """Run `llamactl words` in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _still_hearing():
            code = main(words)
        assert "Traceback" not in err.getvalue()
        return Ran(code, out.getvalue(), err.getvalue())

    def await_daemon(self) -> None:
        """Return once a daemon answers."""
        until(lambda: self.run("status").code != ExitCode.UNREACHABLE)

    def up_words(self, *fake: str, engine: Path = FAKE_ENGINE) -> tuple[str, ...]:
        """The words of `up` with the fake engine; `fake` is how it misbehaves."""
        words = ("up", "--engine", str(engine), "--model", str(self.model))
        return (*words, "--port", str(self.port), *(("--", *fake) if fake else ()))

    def up(self, *fake: str) -> Any:
        """Bring the fake engine up; return the JSON result."""
        return self.run("--json", *self.up_words(*fake)).result


@contextlib.contextmanager
def _still_hearing() -> Iterator[None]:
    """A command that was interrupted hears no more signals, for it ends; this process does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def serving(*words: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Yield `llamactl serve`, what it writes in pipes; it ends with this, whatever fails within."""
    pipe = subprocess.PIPE
    command = [*COMMAND, "serve", *words]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def fresh_home() -> Iterator[Home]:
    """Yield a home; nothing that was started in it outlives it."""
    # Not pytest's tmp_path: the path of a socket below it may have 107 bytes only.
    root = Path(tempfile.mkdtemp(prefix="llamactl-"))
    home = Home(root)
    chosen = {
        "LLAMACTL_CACHE_DIR": str(home.paths.cache),
        "LLAMACTL_STATE_DIR": str(home.paths.state),
        "LLAMACTL_RUNTIME_DIR": str(home.paths.runtime),
        "XDG_CONFIG_HOME": str(root / "config"),
        "LLAMACTL_STOP_TERM_S": "1",
        "LLAMACTL_DRAIN_S": "1",
        "LLAMACTL_CARRY_S": "5",
    }
    with mock.patch.dict(os.environ, chosen):
        for name in mistyped(os.environ):  # of whoever runs the tests
            del os.environ[name]
        try:
            yield home
        finally:
            ended = home.run("down", "--timeout", "30")
            assert ended.code in {ExitCode.OK, ExitCode.FAILED}, ended  # FAILED: it lost something
            assert remains.engine_pids(home.paths) == []
            shutil.rmtree(root)
