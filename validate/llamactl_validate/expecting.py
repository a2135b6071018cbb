"""What a scenario expects, and how it says what it found instead."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POLL_S = 0.02
SHOWN_CHARS_MAX = 500
"""Of what was found; a receipt may list hundreds of slots."""
_T = TypeVar("_T")


class Failed(AssertionError):  # noqa: N818 (a verdict, as the next two)
    """Something was lost, or was not as it has to be."""


class Skipped(Exception):  # noqa: N818
    """It cannot be shown with this model or on this machine; says why."""


class NotReproducible(Exception):  # noqa: N818
    """Two runs that nothing disturbed differ, so that a disturbed one shows nothing."""


@contextmanager
def undisguised() -> Iterator[None]:
    """Raise an interrupt as one: what fails on the way out of it is no finding."""
    try:
        yield
    except Exception as exc:
        came_of: BaseException | None = exc
        while came_of is not None:
            if isinstance(came_of, KeyboardInterrupt):
                raise came_of from None
            came_of = came_of.__context__
        raise


def expect(what: str, found: object, wanted: object) -> None:
    """Raise `Failed`, with the first difference, unless what was found is what is wanted."""
    if found != wanted:
        where, one, other = _difference("", found, wanted)
        raise Failed(f"{what}{where}: {_shown(one)} instead of {_shown(other)}")


def expect_that(what: str, holds: bool, found: object = "") -> None:
    """Raise `Failed`, with what was found, unless it holds."""
    if not holds:
        raise Failed(f"not so: {what}" + (f" ({_shown(found)})" if found != "" else ""))


def until(what: str, check: Callable[[], _T], *, within_s: float) -> _T:
    """Return the first true value; raise `Failed` with the last one after so many seconds."""
    deadline = time.monotonic() + within_s
    while not (value := check()):
        if time.monotonic() > deadline:
            raise Failed(f"{what}: still {_shown(value)} after {within_s:g} s")
        time.sleep(POLL_S)
    return value


def _difference(where: str, found: object, wanted: object) -> tuple[str, object, object]:
    """Return the place in lists of the same length at which they differ first, and both values."""
    match found, wanted:
        case [*ones], [*others] if len(ones) == len(others):
            for n, (one, other) in enumerate(zip(ones, others, strict=True)):
                if one != other:
                    return _difference(f"{where}[{n}]", one, other)
    return where, found, wanted


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."
