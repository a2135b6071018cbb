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


def rotate(path: Path, files_max: int, number: int) -> None:
    """Rotate as the holder does, and write a line into the new file."""
    for older in range(files_max - 1, 0, -1):
        source = path if older == 1 else path.with_name(f"{path.name}.{older - 1}")
        if source.exists():
            source.replace(path.with_name(f"{path.name}.{older}"))
    path.unlink(missing_ok=True)
    write(path, number)


async def over_rotations(path: Path, files_max: int, rotations: int) -> list[str]:
    """Follow a log of one line that is rotated so often while nobody reads."""
    until, lines = asyncio.Event(), list[str]()
    write(path, 0)
    async for chunk in logs.read(path, 10, follow=True, until=until):
        lines += chunk.decode().splitlines()
        if not until.is_set():
            for number in range(1, rotations + 1):
                rotate(path, files_max, number)
            until.set()
    return lines


def test_a_follower_that_stalls_goes_on_with_the_next_file_in_order(tmp_path: Path) -> None:
    lines = asyncio.run(over_rotations(tmp_path / "engine.log", files_max=12, rotations=11))
    assert lines == [f"line {number}" for number in range(12)]


@pytest.mark.parametrize("files_max", [1, 3])
def test_a_follower_is_told_of_files_that_were_rotated_away(tmp_path: Path, files_max: int) -> None:
    lines = asyncio.run(over_rotations(tmp_path / "engine.log", files_max, rotations=9))
    first, notice, *rest = lines
    assert first == "line 0"
    assert notice.split(" ", 2)[1:] == ["daemon", logs.MAY_BE_LOST]
    assert rest == [f"line {number}" for number in range(10 - files_max, 10)]
