"""What was started here and runs, so that all of it can be ended at once.

Whoever waits for an answer of it then waits no longer, on whichever thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

_ends: dict[subprocess.Popen[bytes], Callable[[], None]] = {}


def add(process: subprocess.Popen[bytes], end: Callable[[], None]) -> None:
    """Note a process, and what ends it without a wait."""
    _ends[process] = end


def ended(process: subprocess.Popen[bytes]) -> None:
    """Forget a process that was waited for."""
    _ends.pop(process, None)


def end_all() -> None:
    """End everything; fit for a signal's handler."""
    for end in [*_ends.values()]:
        end()
