"""The holder as the program that it is: run it, and read what it leaves behind."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import llamactl_supervisor.holder
import psutil
import pytest
from llamactl_supervisor.holder import Log, line
from sandbox import WITHIN_S, until

HOLDER = llamactl_supervisor.holder.__file__


class Held:
    """One holder with a shell script for an engine."""

    def __init__(self, directory: Path, script: str, **order: Any) -> None:
        self.directory = directory
        self.order = {
            "instance_id": "abc",
            "directory": str(directory),
            "argv": ["/bin/sh", "-c", script],
            "env": {"PATH": os.environ["PATH"], "SECRET": "hunter2"},
            "context": None,
            "log": str(directory / "engine.log"),
            "log_bytes_max": 2**20,
            "log_files_max": 3,
            "last_lines_max": 5,
            "oom_score_add": 200,
        } | order

    def start(self, **popen: Any) -> subprocess.Popen[bytes]:
        """Start it; return when it has answered."""
        holder = subprocess.Popen(
            [sys.executable, "-I", "-S", HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            **popen,
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        with holder.stdin, holder.stdout:
            holder.stdin.write(json.dumps(self.order).encode())
            holder.stdin.close()
            self.answer = holder.stdout.read()
        return holder

    def run(self, **popen: Any) -> dict[str, Any]:
        """Run it to its end; return its exit record."""
        assert self.start(**popen).wait(WITHIN_S) == 0
        return self.read("exit.json")

    def read(self, name: str) -> dict[str, Any]:
        """Read one of its records."""
        record: dict[str, Any] = json.loads((self.directory / name).read_text())
        return record

    def log(self) -> list[str]:
        """Return the log without times."""
        lines = (self.directory / "engine.log").read_text().splitlines()
        return [text.split(" ", 1)[1] for text in lines]


def megabytes(count: int) -> str:
    """Return a script that writes so many lines of 1 MiB."""
    body = "head -c 1048576 /dev/zero | tr '\\0' x; echo; i=$((i+1))"
    return f"i=0; while [ $i -lt {count} ]; do {body}; done"


def test_log_and_exit_status_are_kept(tmp_path: Path) -> None:
    held = Held(tmp_path, "echo one; echo two; echo three >&2; printf unfinished; exit 3")
    record = held.run()
    assert (record["exit_code"], record["signal"], record["exec_errno"]) == (3, None, None)
    assert sorted(record["last_lines"]) == ["one", "three", "two", "unfinished"]
    assert (record["dropped_bytes"], record["instance_id"]) == (0, "abc")
    assert record["max_rss_bytes"] > 0
    out = [text for text in held.log() if text.startswith("stdout")]
    assert out == ["stdout one", "stdout two", "stdout unfinished"]
    assert "stderr three" in held.log()


def test_a_signal_is_told_from_a_status(tmp_path: Path) -> None:
    record = Held(tmp_path, "kill -9 $$").run()
    assert (record["exit_code"], record["signal"]) == (None, 9)


def test_an_engine_that_cannot_be_run_leaves_its_errno(tmp_path: Path) -> None:
    held = Held(tmp_path, "", argv=["/nowhere/llama-server"])
    record = held.run()
    assert (held.answer, record["exec_errno"]) == (b"2", 2)


def test_who_is_who_is_on_record_before_the_engine_runs(tmp_path: Path) -> None:
    """The script itself reads the record: it is there, and names the script."""
    held = Held(tmp_path, f"cat {tmp_path}/holder.json; echo; echo $$")
    last = held.run()["last_lines"]
    record = held.read("holder.json")
    assert json.loads(last[0]) == record
    assert record["engine_pid"] == int(last[1])
    assert len(record["argv_sha256"]) == 64


def test_the_engine_gets_a_session_and_no_descriptor_of_the_caller(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    script = "ls /proc/self/fd | tr '\\n' ' '; readlink /proc/self/fd/0; "
    script += "cat /proc/self/oom_score_adj; echo $$; cut -d ' ' -f 6 /proc/$$/stat"
    held = Held(tmp_path, script)
    record = held.run(pass_fds=[write_fd])
    os.close(write_fd)
    assert os.read(read_fd, 1) == b"", "somebody still holds the caller's pipe"
    os.close(read_fd)
    fds, oom, pid, session = record["last_lines"]
    assert pid == session
    assert fds == "0 1 2 3 /dev/null", "3 is the directory that ls reads"
    before = int(Path("/proc/self/oom_score_adj").read_text())
    assert int(oom) == min(1000, before + 200)


def test_no_secret_is_on_a_command_line(tmp_path: Path) -> None:
    held = Held(tmp_path, "echo ready; read forever < /dev/null; exec sleep 60")
    holder = held.start()
    engine = held.read("holder.json")["engine_pid"]
    for pid in (holder.pid, engine):
        assert "hunter2" not in " ".join(psutil.Process(pid).cmdline())
    # an exec under way has no environment for a moment
    until(lambda: psutil.Process(engine).environ().get("SECRET") == "hunter2")
    os.kill(engine, signal.SIGKILL)
    holder.wait(WITHIN_S)


def test_it_outlives_every_request_to_end_and_dies_with_its_engine(tmp_path: Path) -> None:
    held = Held(tmp_path, "exec sleep 60")
    holder = held.start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        holder.send_signal(number)
    os.kill(held.read("holder.json")["engine_pid"], signal.SIGTERM)
    assert holder.wait(WITHIN_S) == 0
    assert held.read("exit.json")["signal"] == signal.SIGTERM


def test_a_grandchild_that_keeps_the_pipe_does_not_keep_the_holder(tmp_path: Path) -> None:
    held = Held(tmp_path, "sleep 300 & echo $!")
    record = held.run()
    os.kill(int(record["last_lines"][-1]), signal.SIGKILL)
    assert record["exit_code"] == 0


@pytest.mark.parametrize("files", [1, 3])
def test_the_log_is_rotated_by_size_and_count(tmp_path: Path, files: int) -> None:
    Held(tmp_path, "seq 1 40000", log_bytes_max=20_000, log_files_max=files).run()
    logs = sorted(path.name for path in tmp_path.glob("engine.log*"))
    assert logs == ["engine.log", "engine.log.1", "engine.log.2"][:files]
    assert (tmp_path / "engine.log").read_text().splitlines()[-1].endswith("stdout 40000")


def test_files_beyond_a_lowered_count_are_removed(tmp_path: Path) -> None:
    for name in ("2", "3", "17", "old", "5.gz"):
        (tmp_path / f"engine.log.{name}").write_text("earlier\n")
    Held(tmp_path, "seq 1 40000", log_bytes_max=20_000, log_files_max=2).run()
    left = sorted(path.name for path in tmp_path.glob("engine.log*"))
    assert left == ["engine.log", "engine.log.1", "engine.log.5.gz", "engine.log.old"]


def test_a_log_that_cannot_be_written_stalls_nothing(tmp_path: Path) -> None:
    """The log is a directory: every write fails; 8 MB of output pass, and the last lines stay."""
    (tmp_path / "engine.log").mkdir()
    script = (
        "i=0; while [ $i -lt 8 ]; do head -c 1048576 /dev/zero | tr '\\0' x; echo; i=$((i+1)); done"
    )
    record = Held(tmp_path, script + "; echo the end").run()
    assert record["exit_code"] == 0
    assert record["last_lines"][-1] == "the end"
    assert record["dropped_bytes"] > 8 * 2**20


def test_a_log_that_hangs_stalls_nothing(tmp_path: Path) -> None:
    """A FIFO without a reader hangs in open, as a dead network disk would."""
    os.mkfifo(tmp_path / "engine.log")
    script = megabytes(200)
    record = Held(tmp_path, script).run()
    assert record["exit_code"] == 0
    assert record["dropped_bytes"] > 0


def test_what_was_dropped_is_said_in_the_log_once_the_disk_is_back(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.mkdir()
    log = Log(str(path), 2**20, 2)
    log.start()
    log.put(line(b"stdout", b"lost"))
    until(lambda: log.dropped_bytes)
    path.rmdir()
    log.put(line(b"stdout", b"kept"))
    log.close()
    first, second = path.read_text().splitlines()
    assert first.endswith(f"holder {log.dropped_bytes} bytes were dropped")
    assert second.endswith("stdout kept")


def test_what_no_disk_took_is_counted_while_the_engine_runs(tmp_path: Path) -> None:
    (tmp_path / "engine.log").mkdir()
    held = Held(tmp_path, "echo lost; exec sleep 60")
    with held.start() as holder:
        until(lambda: held.read("pulse").get("dropped_bytes"))
        os.kill(held.read("holder.json")["engine_pid"], signal.SIGKILL)
        holder.wait(WITHIN_S)


def test_a_log_that_was_removed_is_made_again_with_its_directory(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    log = Log(str(logs / "engine.log"), 2**20, 2)
    log.start()
    log.put(line(b"stdout", b"before"))
    until(lambda: (logs / "engine.log").exists())
    shutil.rmtree(logs)

    def written() -> bool:
        log.put(line(b"stdout", b"after"))
        return (logs / "engine.log").exists()

    until(written)
    log.close()
    assert logs.stat().st_mode & 0o077 == 0
    assert "after" in (logs / "engine.log").read_text()


def test_a_holder_that_cannot_name_its_engine_does_not_let_it_go(tmp_path: Path) -> None:
    """The disk has room for the first record and not for the one that names the engine."""
    held = Held(tmp_path, "true")
    held.run()
    record = held.read("holder.json") | {"engine_pid": None}
    del record["engine_start_ticks"]
    room = len(json.dumps(record)) + 8

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    held = Held(tmp_path, f"touch {tmp_path}/ran; sleep 60")
    holder = held.start(stderr=subprocess.DEVNULL, preexec_fn=limit)
    assert holder.wait(WITHIN_S) == 1
    assert held.read("holder.json")["engine_pid"] is None
    assert not (tmp_path / "ran").exists()
