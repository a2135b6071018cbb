"""Becomes a program that goes when its parent goes, and stands in nobody's way meanwhile.

    python lowly.py PARENT FLAG PROGRAM [ARGUMENT...]

It is killed when the thread that started it ends, and first when memory is short. With the flag
`idle` it also has the lowest priority for processor and disk, so that it takes little beside a busy
machine; `equal` leaves that out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

import psutil

IDLE, EQUAL = "idle", "equal"
_PR_SET_PDEATHSIG = 1
_LOWEST_NICE = 19
_FIRST_TO_GO = "1000"


def main(words: list[str]) -> None:
    """Take the lowest place; become the program."""
    parent, flag, *command = words
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and so by what it becomes
        signal.signal(ignored, signal.SIG_DFL)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(1)  # it went before we could be told
    # What a container forbids is not needed for the proof.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    if flag == IDLE:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_NICE)
        with contextlib.suppress(OSError, psutil.Error):
            psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
