"""Starts daemons, and ends them and all that came of them when its standard input ends.

    python warden.py FLAG PROGRAM [ARGUMENT...]

Each byte on standard input starts the program once more, `lowly` with this flag; the answer is its
pid, a line. Whoever holds the other end of that pipe may be killed as nothing can be caught: the
pipe ends with them, and everything here with the pipe. What a daemon starts is meant to outlive
it; the kernel then makes it a child of ours, so that nothing gets lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

import psutil

from llamactl_validate import lowly

START = b"\n"
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.01
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(words: list[str]) -> None:
    """Start what is asked for until nobody can ask any more."""
    flag, *command = words
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    for number in _ENDING:
        signal.signal(number, lambda *_: sys.exit(1))
    launcher = [sys.executable, "-P", "-m", lowly.__name__, str(os.getpid()), flag]
    try:
        while os.read(0, len(START)):
            os.write(1, b"%d\n" % _started([*launcher, *command]))
    finally:
        _end()


def _started(words: list[str]) -> int:
    """Start a program that writes to our standard error; return its pid."""
    streams = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, 2, 1),
    ]
    return os.posix_spawn(words[0], words, os.environ, file_actions=streams)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end() -> None:
    """Kill everything that came of us, also what is started meanwhile."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    while found := psutil.Process().children(recursive=True):
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1:])
