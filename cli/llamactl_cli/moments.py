"""A moment as it is written on the command line: how long ago, a date, a time of today."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Annotated

import typer

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def moment(text: str) -> datetime:
    """Return the moment; without a zone it is meant as local time, `12:30` as today's."""
    now = datetime.now().astimezone()
    ago = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    clock = re.fullmatch(r"[0-9]{2}:[0-9]{2}(:[0-9]{2})?", text)
    try:
        if ago is not None:
            return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        if clock is not None:
            return datetime.fromisoformat(f"{now:%Y-%m-%d} {text}").astimezone()
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        message = f"must be a time span (10m, 24h, 7d), a date or a time (ISO 8601), not {text!r}"
        raise typer.BadParameter(message) from None


Since = Annotated[
    datetime | None,
    typer.Option(
        "--since",
        parser=moment,
        metavar="WHEN",
        help="Not older than this: 10m, 24h, 7d, 12:30, 2026-10-02, 2026-10-02T12:30.",
    ),
]
