"""The parent of one engine: a program of its own that keeps the engine's log and exit status.

Run as `python -I -S holder.py` with the order (JSON, see `launch.holder_order`) on standard input.
It imports the standard library only and nothing of ours. It lives exactly as long as the engine:
signals that ask it to end are ignored, so neither log nor exit status depends on anyone.

    stdin    the order; never argv, because the environment in it may hold secrets
    stdout   the errno and perhaps of what, if the engine could not be run; its end means that the
             attempt is over
    DIRECTORY/holder.json   who is who, written before and after the engine is forked
    DIRECTORY/pulse         its mtime moves while the engine writes, whatever the disk does; what
                            no disk took is counted in it
    DIRECTORY/exit.json     how the engine ended, and its last lines

The two pipes are read whatever happens to the log: a reader that stalls stops generation for good.
Writing is therefore a thread's business, behind a queue with a bound; what does not fit is dropped
and counted. The engine is released into exec only when holder.json names it, so that an engine
that nobody can identify does not exist.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import errno
import functools
import hashlib
import json
import os
import queue
import resource
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 16384
"""Read, queued and written at once; a log file exceeds its size by no more than such a chunk."""
LINE_BYTES_MAX = 16384
LAST_LINE_CHARS_MAX = 1000
QUEUE_CHUNKS_MAX = 1024
PULSE_S = 0.25
FAILURE_BYTES_MAX = 4096 + 64
LOOK_S = 1.0
"""Pause between two looks whether the log is still where it was."""
DRAIN_S = 0.5
"""How long output is awaited after the engine's end: a grandchild may hold the pipe for ever."""
FLUSH_S = 3.0
"""How long the log may take after the engine's end."""


class Log:
    """Writes chunks of whole lines to a file, rotated by size and count, from its own thread."""

    def __init__(self, path: str, bytes_max: int, files_max: int) -> None:
        self.path, self.bytes_max, self.files_max = path, bytes_max, files_max
        self._overflown_bytes = 0
        self._unwritten_bytes = 0
        self._reported_bytes = 0
        self._fd = -1
        self._size = 0
        self._look_due = 0.0
        self._chunks: queue.Queue[bytes | None] = queue.Queue(QUEUE_CHUNKS_MAX)
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def dropped_bytes(self) -> int:
        """Bytes that are in no log, for want of a disk that takes them."""
        return self._overflown_bytes + self._unwritten_bytes

    def start(self) -> None:
        """Start writing. Not before the engine is forked: a fork wants one thread."""
        self._thread.start()

    def put(self, chunk: bytes) -> None:
        """Queue `chunk`, or drop and count it. Never waits."""
        try:
            self._chunks.put_nowait(chunk)
        except queue.Full:
            self._overflown_bytes += len(chunk)

    def close(self) -> None:
        """Write what is queued, for `FLUSH_S` seconds at most."""
        with contextlib.suppress(queue.Full):
            self._chunks.put(None, timeout=FLUSH_S)
            self._thread.join(FLUSH_S)

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            missing = self.dropped_bytes - self._reported_bytes
            notice = b"" if not missing else line(b"holder", b"%d bytes were dropped" % missing)
            if self._write(notice + chunk):
                self._reported_bytes += missing
            else:
                self._unwritten_bytes += len(chunk)

    def _write(self, data: bytes) -> bool:
        """Append all of `data` or none of it: a torn line would be read as a whole one."""
        try:
            if self._fd < 0 or self._lost():
                self._open()
            if self._size and self._size + len(data) > self.bytes_max:
                self._rotate()
            written = os.write(self._fd, data)
            if written < len(data):
                os.ftruncate(self._fd, self._size)
                return False
        except OSError:
            return False
        self._size += written
        return True

    def _open(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        Path(self.path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._fd).st_size

    def _lost(self) -> bool:
        """Say, now and then, whether the open file is the log no more: it or its directory went."""
        if time.monotonic() < self._look_due:
            return False
        self._look_due = time.monotonic() + LOOK_S
        try:
            return not os.path.samestat(Path(self.path).stat(), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def _rotate(self) -> None:
        for number in range(self.files_max - 1, 0, -1):
            older = self.path if number == 1 else f"{self.path}.{number - 1}"
            with contextlib.suppress(FileNotFoundError):
                Path(older).replace(f"{self.path}.{number}")
        Path(self.path).unlink(missing_ok=True)
        self._remove_surplus()
        self._open()

    def _remove_surplus(self) -> None:
        """Remove what an earlier holder kept while more files were allowed."""
        log = Path(self.path)
        for file in log.parent.glob(f"{log.name}.*"):
            number = file.suffix[1:]
            if number.isdecimal() and int(number) >= self.files_max:
                with contextlib.suppress(OSError):
                    file.unlink()


def line(stream: bytes, text: bytes) -> bytes:
    """Return one log line: UTC time, stream, text."""
    now = datetime.datetime.now(datetime.UTC)
    stamp = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return b"%s %s %s\n" % (stamp.encode(), stream, text)


class Stream:
    """One output pipe of the engine, cut into lines."""

    def __init__(self, name: bytes, log: Log, last: collections.deque[str]) -> None:
        self.name, self.log, self.last = name, log, last
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self._partial = b""

    def drain(self) -> bool:
        """Take what is there; False at the end of the stream."""
        try:
            data = os.read(self.read_fd, READ_BYTES)
        except BlockingIOError:
            return True
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LINE_BYTES_MAX or (not data and self._partial):
            lines.append(self._partial)
            self._partial = b""
        if lines:
            self.last.extend(text.decode(errors="replace")[:LAST_LINE_CHARS_MAX] for text in lines)
            self.log.put(b"".join(line(self.name, text) for text in lines))
        return bool(data)


def start_ticks(pid: int) -> int:
    """Return the process's start in clock ticks since boot: field 22 of /proc/PID/stat."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def write_json(path: str, value: dict[str, object]) -> None:
    """Replace `path` by `value` in one step; the umask keeps it to its owner."""
    new = Path(path + ".new")
    new.write_text(json.dumps(value))
    new.replace(path)


def run_engine(order: dict[str, Any], streams: list[Stream], gate: int, failure: int) -> None:
    """In the forked child: become the engine, or write the errno of exec to `failure`."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((null, streams[0].write_fd, streams[1].write_fd)):
        os.dup2(source, target)
    with contextlib.suppress(OSError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + order["oom_score_add"])))
    # SIGPIPE stays ignored, so that the loss of the holder is not the loss of the engine.
    for number in set(signal.valid_signals()) - {signal.SIGPIPE}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    if os.read(gate, 1):
        try:
            inherit(order["context"])
        except OSError as exc:
            os.write(failure, f"{exc.errno} {exc.filename}".encode())
            os._exit(127)
        try:
            os.execve(order["argv"][0], order["argv"], order["env"])
        except OSError as exc:
            os.write(failure, str(exc.errno).encode())
    os._exit(127)


def inherit(context: dict[str, Any] | None) -> None:
    """Take on what a process has from its caller. Raises OSError; its filename says which part."""
    if context is None:
        return
    os.umask(context["umask"])
    steps: list[tuple[str, Callable[[], object]]] = [
        (f"directory {context['cwd']}", lambda: os.chdir(context["cwd"])),
        ("affinity", lambda: os.sched_setaffinity(0, context["affinity"])),
        ("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, context["nice"])),
    ]
    for name, (soft, hard) in context["rlimits"].items():
        steps.append((f"limit {name}", functools.partial(limit, name, soft, hard)))
    for what, take in steps:
        try:
            take()
        except OSError as exc:
            raise OSError(exc.errno, os.strerror(exc.errno or 0), what) from exc
        except ValueError:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), what) from None


def limit(name: str, soft: int, hard: int) -> None:
    """Set a limit; the hard one stays below ours, which only root could raise."""
    which = getattr(resource, f"RLIMIT_{name}")
    ours = resource.getrlimit(which)[1]
    if ours != resource.RLIM_INFINITY:
        hard = ours if hard == resource.RLIM_INFINITY else min(hard, ours)
    resource.setrlimit(which, (soft, hard))


def watch(pid: int, streams: list[Stream], log: Log, pulse: str) -> None:
    """Drain both streams until the engine is gone and they end, or have been silent long enough."""
    poll = select.poll()
    engine_fd = os.pidfd_open(pid)
    poll.register(engine_fd, select.POLLIN)
    open_streams = {stream.read_fd: stream for stream in streams}
    for fd in open_streams:
        poll.register(fd, select.POLLIN | select.POLLHUP)
    alive, give_up, pulse_due, told, heard = True, float("inf"), 0.0, 0, False
    while alive or (open_streams and time.monotonic() < give_up):
        # Once more after the last output: what the disk did not take of it is known by then.
        wait_ms = PULSE_S * 1000 if heard else None
        if not alive:
            wait_ms = max(0.0, give_up - time.monotonic()) * 1000
        found = poll.poll(wait_ms)
        heard = bool(found)
        for fd, _ in found:
            if fd == engine_fd:
                alive, give_up = False, time.monotonic() + DRAIN_S
                poll.unregister(fd)
            elif not open_streams[fd].drain():
                poll.unregister(fd)
                del open_streams[fd]
        if log.dropped_bytes != told:
            told = log.dropped_bytes
            with contextlib.suppress(OSError):
                write_json(pulse, {"dropped_bytes": told})
        if heard and time.monotonic() >= pulse_due:
            with contextlib.suppress(OSError):
                os.utime(pulse)
            pulse_due = time.monotonic() + PULSE_S


def main() -> None:
    """Run the engine that standard input orders."""
    os.setsid()
    os.umask(0o077)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.stdin.buffer.read())
    directory, argv = order["directory"], order["argv"]
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 2)

    last: collections.deque[str] = collections.deque(maxlen=order["last_lines_max"])
    log = Log(order["log"], order["log_bytes_max"], order["log_files_max"])
    streams = [Stream(name, log, last) for name in (b"stdout", b"stderr")]
    gate_read, gate_write = os.pipe()
    failure_read, failure_write = os.pipe()
    record = {
        "instance_id": order["instance_id"],
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "holder_pid": os.getpid(),
        "holder_start_ticks": start_ticks(os.getpid()),
        "argv_sha256": hashlib.sha256("\0".join(argv).encode()).hexdigest(),
    }
    write_json(f"{directory}/holder.json", record | {"engine_pid": None})
    pid = os.fork()
    if pid == 0:
        os.close(gate_write)
        run_engine(order, streams, gate_read, failure_write)
    for fd in (gate_read, failure_write, streams[0].write_fd, streams[1].write_fd):
        os.close(fd)
    engine = {"engine_pid": pid, "engine_start_ticks": start_ticks(pid)}
    write_json(f"{directory}/holder.json", record | engine)
    write_json(f"{directory}/pulse", {})
    log.start()
    os.write(gate_write, b"!")
    os.close(gate_write)
    failed = os.read(failure_read, FAILURE_BYTES_MAX)
    os.write(1, failed)
    os.dup2(null, 1)

    watch(pid, streams, log, f"{directory}/pulse")
    _, status, usage = os.wait4(pid, 0)
    log.close()
    write_json(
        f"{directory}/exit.json",
        {
            "instance_id": order["instance_id"],
            "engine_pid": pid,
            "exec_errno": int(failed.split()[0]) if failed else None,
            "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "ended_at": datetime.datetime.now(datetime.UTC).isoformat(),
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "max_rss_bytes": usage.ru_maxrss * 1024,
            "last_lines": list(last),
            "dropped_bytes": log.dropped_bytes,
        },
    )


if __name__ == "__main__":
    main()
