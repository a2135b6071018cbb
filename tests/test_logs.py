"""Reading a log that is being written and rotated."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import logs

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, *numbers: int) -> None:
    with path.open("a") as out:
        out.writelines(f"line {number}\n" for number in numbers)


async def collect(path: Path, count: int, since: datetime | None = None) -> list[str]:
    never = asyncio.Event()
    chunks = logs.read(path, count, follow=False, until=never, since=since)
    text = b"".join([chunk async for chunk in chunks])
    return text.decode().splitlines()


@pytest.mark.parametrize("count", [0, 1, 4, 100])
def test_the_last_lines_reach_over_rotated_files(tmp_path: Path, count: int) -> None:
    path = tmp_path / "engine.log"
    for name, numbers in ((".10", (0, 1)), (".2", (2, 3)), (".1", (4, 5)), ("", (6, 7))):
        write(tmp_path / f"engine.log{name}", *numbers)
    (tmp_path / "engine.log.new").write_text("not a log\n")
    expected = [f"line {number}" for number in range(8)][max(0, 8 - count) :]
    assert asyncio.run(collect(path, count)) == expected


def test_lines_of_an_earlier_time_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    stamps = ("2026-01-01T09:59:59.999Z", "2026-01-01T10:00:00.000Z", "2026-01-02T00:00:00.000Z")
    (tmp_path / "engine.log.1").write_text(f"{stamps[0]} stdout a\n{stamps[1]} stdout b\n")
    path.write_text(f"{stamps[2]} stderr c\n")
    since = datetime.fromisoformat("2026-01-01T12:00:00+02:00")
    assert [line[-1] for line in asyncio.run(collect(path, 10, since))] == ["b", "c"]
    assert [line[-1] for line in asyncio.run(collect(path, 1, since))] == ["c"]
    assert asyncio.run(collect(path, 10, since + timedelta(days=1))) == []


def test_no_log_yet_is_no_line(tmp_path: Path) -> None:
    assert asyncio.run(collect(tmp_path / "engine.log", 10)) == []


def test_a_follower_loses_nothing_over_a_rotation(tmp_path: Path) -> None:
    """It begins before the file exists, and ends with what was written before it was told to."""
    path = tmp_path / "engine.log"

    async def follow() -> str:
        until, text = asyncio.Event(), ""
        async for chunk in logs.read(path, 10, follow=True, until=until):
            text += chunk.decode()
            if not text:
                write(path, 1)
            elif text.endswith("line 1\n"):
                write(path, 2)
                path.rename(tmp_path / "engine.log.1")
                write(path, 3)
            elif text.endswith("line 3\n"):
                write(path, 4)
                until.set()
        return text

    assert asyncio.run(asyncio.wait_for(follow(), 30)) == "line 1\nline 2\nline 3\nline 4\n"
