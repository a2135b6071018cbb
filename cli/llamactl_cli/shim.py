"""`llamactl run`: stands in for llama-server to the one who starts it.

A program of its own: the standard library, and one leaf of the supervisor (`hold`). It owns the
caller's port and terminal, and the daemon owns the engine: `run/owner.py` has how the two come
together. Here is what surrounds that: what is no server is handed to the real llama-server, and the
end is one that llama-server could have had.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from llamactl_cli.run import places, words
from llamactl_cli.run.owner import FAILED, OURS_FAILED, Owner, StopError

if TYPE_CHECKING:
    from collections.abc import Sequence

NOT_RUN, NOT_FOUND = 126, 127
"""As a shell has it, for a program that we were to become."""


def main(argv: Sequence[str]) -> int:
    """Run the command line that follows `llamactl run`.

    Returns an exit code only where nothing was run; otherwise the process ends in here.
    """
    try:
        asked = words.parse(argv, os.environ)
        if asked is None:
            sys.stdout.write(words.USAGE)
            return 0
        if (why := words.no_server(asked.args, os.environ)) is not None:
            become(asked, f"{why}: handed to the real one")
        asyncio.run(_run(Owner(asked)))
    except words.UsageError as exc:
        _say(str(exc))
    except words.NoAddressError as exc:
        _say(str(exc))
        return FAILED
    except StopError as exc:
        _say(str(exc))
        return exc.code
    return OURS_FAILED


async def _run(owner: Owner) -> NoReturn:
    """End the process in the loop: to close it would wait for threads that nobody reads from."""
    end = await owner.run()
    if end.plain_program is not None:
        become(owner.asked, end.plain_program)
    if end.signal:
        die(end.signal)
    os._exit(end.code)


def die(number: int) -> NoReturn:
    """End by this signal as if nobody had caught it; no core is written, the engine's is enough."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def become(asked: words.Words, why: str) -> NoReturn:
    """Become the real llama-server, with a line that says so. Raises `StopError`."""
    program = asked.program
    if words.is_bare(program):
        program = os.environ.get("LLAMACTL_ENGINE_PATH") or shutil.which(program) or ""
    try:
        program = program or places.built_engine(_say)
        _say(f"{why} ({program})")
        os.execv(program, [asked.program, *asked.args])
    except places.PlacesError as exc:
        raise StopError(str(exc)) from exc
    except OSError as exc:
        code = NOT_FOUND if exc.errno == errno.ENOENT else NOT_RUN
        raise StopError(f"{program}: {exc.strerror}", code) from exc


def _say(text: str) -> None:
    sys.stderr.write(f"llamactl run: {text}\n")
    sys.stderr.flush()
