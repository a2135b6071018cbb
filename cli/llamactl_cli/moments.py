"""A moment or a span as it is written on the command line: 20m, how long ago, a date, a time."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Annotated

import typer

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SPAN = re.compile(r"([0-9]{1,6})([smhdw])")


def span(text: str) -> timedelta:
    """Return a time span: `90s`, `20m`, `2h`."""
    found = _SPAN.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise typer.BadParameter(f"must be a time span (90s, 20m, 2h), not {text!r}")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def moment(text: str) -> datetime:
    """Return the moment; without a zone it is meant as local time, `12:30` as the last one."""
    now = datetime.now().astimezone()
    ago = _SPAN.fullmatch(text)
    clock = re.fullmatch(r"[0-9]{2}:[0-9]{2}(:[0-9]{2})?", text)
    try:
        if ago is not None:
            return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        if clock is not None:
            at = datetime.fromisoformat(f"{now:%Y-%m-%d} {text}")
            past = at if at.astimezone() <= now else at - timedelta(days=1)
            return past.astimezone()
        found = datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        message = f"must be a time span (10m, 24h, 7d), a date or a time (ISO 8601), not {text!r}"
        raise typer.BadParameter(message) from None
    if found > now:
        raise typer.BadParameter(f"{text!r} is yet to come: it is {now:%Y-%m-%d %H:%M} here")
    return found


Since = Annotated[
    datetime | None,
    typer.Option(
        "--since",
        parser=moment,
        metavar="WHEN",
        help="Not older than this: 10m, 24h, 7d, 12:30, 2026-10-02, 2026-10-02T12:30.",
    ),
]
