"""What is written for the caller: the engine's log and our own lines, never waiting for a reader.

A thread for each stream, behind a queue with a bound: a pipe that nobody reads holds up the thread
alone. The descriptors stay blocking, for they may be shared with other programs.
"""

from __future__ import annotations

import os
import queue
import threading
import time

LINES_MAX = 4096
PREFIX = b"llamactl run: "


class _Stream:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: queue.Queue[bytes] = queue.Queue(LINES_MAX)
        self._dropped = self._reported = 0
        self._closed = False
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, line: bytes) -> None:
        """Queue a whole line, or drop and count it."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def flush(self, within_s: float) -> None:
        """Return once everything is written, or after `within_s` seconds."""
        deadline = time.monotonic() + within_s
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and not self._closed:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._lines.all_tasks_done.wait(left_s):
                    return

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if missing := self._dropped - self._reported:
                self._reported += missing
                line = PREFIX + b"%d lines were dropped: nobody read them\n" % missing + line
            self._write(line)
            self._lines.task_done()

    def _write(self, data: bytes) -> None:
        while data and not self._closed:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                time.sleep(0.05)  # somebody else has made the descriptor one that does not block
            except OSError:
                self._closed = True


class Screen:
    """stdout and stderr."""

    def __init__(self) -> None:
        self._out, self._err = _Stream(1), _Stream(2)

    def log(self, line: bytes) -> None:
        """Write a line of the engine's log (UTC time, stream, text) where the engine wrote it."""
        _, stream, text = (*line.split(b" ", 2), b"", b"")[:3]
        if stream == b"stdout":
            self._out.put(text + b"\n")
        else:
            self._err.put((b"" if stream == b"stderr" else PREFIX) + text + b"\n")

    def say(self, text: str) -> None:
        """Write a line of our own to stderr."""
        self._err.put(PREFIX + text.encode(errors="replace") + b"\n")

    def flush(self, within_s: float) -> None:
        """Give both readers that long to take what is left."""
        self._err.flush(within_s)
        self._out.flush(within_s)
