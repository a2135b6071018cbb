"""How moments are read, and how screens, paths and bars are written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import typer
from cli_home import Home, fresh_home
from llamactl_cli import text
from llamactl_cli.moments import moment

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS = 80


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


@pytest.mark.parametrize(
    ("said", "ago"),
    [
        ("90s", timedelta(seconds=90)),
        ("10m", timedelta(minutes=10)),
        ("24h", timedelta(days=1)),
        ("2w", timedelta(weeks=2)),
    ],
)
def test_a_span_is_so_long_ago(said: str, ago: timedelta) -> None:
    assert abs(datetime.now(UTC) - ago - moment(said)) < timedelta(seconds=5)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("2025-10-02", datetime(2025, 10, 2).astimezone()),
        ("2025-10-02T12:30", datetime(2025, 10, 2, 12, 30).astimezone()),
        ("2025-10-02 12:30:05", datetime(2025, 10, 2, 12, 30, 5).astimezone()),
        ("2025-10-02T12:30Z", datetime(2025, 10, 2, 12, 30, tzinfo=UTC)),
        ("2025-10-02T12:30+02:00", datetime(2025, 10, 2, 10, 30, tzinfo=UTC)),
    ],
)
def test_a_date_is_local_unless_it_says_so(said: str, meant: datetime) -> None:
    assert moment(said) == meant


def test_a_time_is_of_today() -> None:
    now = datetime.now().astimezone()
    assert moment("00:00") == now.replace(hour=0, minute=0, second=0, microsecond=0)


def test_a_time_that_is_not_there_yet_today_is_yesterdays() -> None:
    now = datetime.now().astimezone()
    soon = (now + timedelta(hours=2)).replace(microsecond=0)
    assert timedelta(0) <= now - moment(f"{soon:%H:%M:%S}") <= timedelta(days=1)


def test_a_date_to_come_is_a_usage_error(home: Home) -> None:
    ran = home.run("ledger", "--since", "2999-01-01")
    assert (ran.code, ran.out) == (2, "")
    assert "is yet to come" in ran.err


@pytest.mark.parametrize(
    "said", ["", "10", "10y", "-5m", "25:00", "2026-13-01", "999999w", "yesterday", "0001-01-01"]
)
def test_what_is_no_moment_is_a_usage_error(home: Home, said: str) -> None:
    with pytest.raises(typer.BadParameter):
        moment(said)
    ran = home.run("ledger", "--json", "--since", said)
    assert (ran.code, ran.error["code"]) == (2, "invalid_request")


def test_a_screen_has_80_columns_and_breaks_no_word() -> None:
    long = " ".join(["word"] * 40)
    lines = text.screen([("key", long), ("b", None), ("c", "x")]).splitlines()
    assert all(len(line) <= COLUMNS for line in lines)
    assert " ".join(lines[:-1]).split() == ["key", *long.split()]
    assert lines[-1] == "c    x"


def test_a_path_is_shortened_in_the_middle() -> None:
    assert text.middle("/short", 6) == "/short"
    said = text.middle("/home/somebody/models/" + "a" * 60 + "/model-q4.gguf", 40)
    assert len(said) == 40
    assert said.startswith("/home/somebod...")
    assert said.endswith("/model-q4.gguf")


@pytest.mark.parametrize(
    ("part", "whole", "said"),
    [
        *((0, 10, "....."), (1, 1000, "#...."), (5, 10, "##..."), (10, 10, "#####")),
        *((11, 10, "#####"), (0, 0, "....."), (1, 0, "#....")),
    ],
)
def test_a_bar_is_full_only_when_it_is(part: int, whole: int, said: str) -> None:
    assert text.bar(part, whole, 5) == said
