"""The one owner of stdout and stderr: a result goes to the first, everything else to the second."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, Protocol

from llamactl_cli.text import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from llamactl_supervisor.errors import LlamactlError

JSON_FLAG = "--json"
LAST_LINES_MAX = 12
"""How many last lines, of an engine or a daemon that is gone, an error shows to a person."""


class _Closed(io.TextIOBase):
    """A stdout that was closed before we began: whoever writes a result to it is told."""

    def write(self, _: str) -> int:
        raise OSError(errno.EBADF, "stdout is closed: the result cannot be written")


def stand_in() -> None:
    """Give what was closed before we began a stand-in: Python itself has None there.

    The descriptors are taken as well, and inherited: the next file must not become our stdout.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:
        sys.stderr = io.StringIO()


class View(Protocol):
    """One result. Both forms say the same."""

    def text(self) -> str:
        """Return what a person reads."""

    def data(self) -> Mapping[str, Any]:
        """Return what a script reads."""


class Output:
    """Writes views, notes and errors, each as text or as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._said: set[str] = set()
        for stream in (sys.stdout, sys.stderr):
            # A path may hold what the terminal cannot show.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")

    @property
    def talks(self) -> bool:
        """Whether notes are wanted: with --json a script may parse stderr, a terminal does not."""
        return not self.as_json or sys.stderr.isatty()

    def emit(self, view: View, *, raw: bool = False) -> None:
        """Write the result; `raw` for a program, which is to have it as it is."""
        text = _dump(view.data(), indent=2) if self.as_json else view.text()
        self.line(text, raw=raw)

    def emit_line(self, view: View, *, raw: bool = False) -> bool:
        """Write one result of many; False when nobody reads them any more."""
        return self.line(_dump(view.data()) if self.as_json else view.text(), raw=raw)

    def line(self, text: str, *, raw: bool = False) -> bool:
        """Write `text` to stdout now; False when the reader is gone, which is no error.

        What would steer a terminal is written out, unless `raw`: names of pages and models, and
        what the engine logs, may be chosen by whoever sends it requests.
        """
        text = text if raw or self.as_json else shown(text)
        try:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            # What is still buffered must not complain when the interpreter exits.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
            return False
        return True

    def say(self, text: str) -> None:
        """Write a note to stderr."""
        if self.talks:
            self._err(text)

    def fail(self, exc: LlamactlError) -> None:
        """Write the error to stderr."""
        if self.as_json:
            problem = {"code": exc.code, "message": exc.message, "hint": exc.hint}
            self._err(_dump({"error": problem | {"details": exc.details}}))
            return
        self._err(f"llamactl: {exc.message}")
        for last in exc.details.get("last_lines", ())[-LAST_LINES_MAX:]:
            self._err(f"  | {last}")
        if exc.hint:
            self._err(f"  {exc.hint}")

    def say_once(self, text: str) -> None:
        """Write a note that more than one part of a command may have."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    @contextlib.contextmanager
    def activity(self, doing: str) -> Iterator[Callable[[str], None]]:
        """Show that something goes on; call the yielded function with news of it."""
        if not self.talks:
            yield lambda _: None
        elif sys.stderr.isatty():
            from rich.console import Console
            from rich.text import Text

            with Console(stderr=True).status(doing) as status:
                yield lambda news: status.update(Text(shown(news or doing)))
        else:
            yield _Once(self.say).tell

    def _err(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.write((text if self.as_json else shown(text)) + "\n")
            sys.stderr.flush()


class _Once:
    """Says each piece of news once, where nothing can be redrawn."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last = ""

    def tell(self, news: str) -> None:
        if news and news != self._last:
            self._say(news)
        self._last = news


def _dump(data: Mapping[str, Any], indent: int | None = None) -> str:
    dumped = json.dumps(data, indent=indent, ensure_ascii=False)
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", dumped)  # they steer too
