"""What stands in the way of page files costs nothing: a typed error, and later all is as before."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live_engine import LiveEngine, live_engine
from llamactl_validate.streams import streaming_socket, streams
from page_conversations import OPTIONS, contents, converse, go_on, hold, refused
from sandbox import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from live_engine import Answer
    from tiny_models import TinyModels

    Limit = Callable[[LiveEngine], AbstractContextManager[None]]

N_SMALL, N_BIG, N_HUGE = 100, 1000, 2000
N_BYTES_HALF = 1 << 20
"""Half of what the big conversation takes, and five times what the small one takes."""
N_BYTES_ENOUGH = 64 << 20
TRIES = 5
"""What comes after the end of a spill says nothing: that run is taken again."""

IN_OWN_MOUNTS = f"""#!/bin/sh
exec unshare --mount --propagation private sh -c '
    mount -t tmpfs -o size={N_BYTES_ENOUGH} none "$0" && exec "$@"
' "DIRECTORY" "ENGINE" "$@"
"""
"""The mount is seen by the engine alone, and ends with it."""


def names(live: LiveEngine) -> list[str]:
    """Return the names of the pages in memory."""
    return [page["name"] for page in live.pages()]


# A limit on the whole directory


def mounted_again(live: LiveEngine, options: str) -> None:
    inside = ["nsenter", f"--mount=/proc/{live.process.pid}/ns/mnt"]
    directory = "/" + str(live.slot_files).split("/root/", 1)[1]
    subprocess.run([*inside, "mount", "-o", f"remount,{options}", directory], check=True)


@contextlib.contextmanager
def disk_of_half_a_page(live: LiveEngine) -> Iterator[None]:
    mounted_again(live, f"size={N_BYTES_HALF}")
    yield
    mounted_again(live, f"size={N_BYTES_ENOUGH}")


@contextlib.contextmanager
def disk_that_is_read_only(live: LiveEngine) -> Iterator[None]:
    mounted_again(live, "ro")
    yield
    mounted_again(live, "rw")


@contextlib.contextmanager
def files_of_half_a_page(live: LiveEngine) -> Iterator[None]:
    """Past this limit a write raises SIGXFSZ, which ends a process that does not see to it."""
    pid, kind = live.process.pid, resource.RLIMIT_FSIZE
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (N_BYTES_HALF, before[1]))
    yield
    resource.prlimit(pid, kind, before)


LIMITS: dict[str, tuple[str, Limit, int, str]] = {
    "half a page of disk": ("on_own_disk", disk_of_half_a_page, 507, "no_space"),
    "half a page in a file": ("plain", files_of_half_a_page, 507, "no_space"),
    "a disk that is read-only": ("on_own_disk", disk_that_is_read_only, 500, "no_access"),
}
"""On which engine, what, and the error that is due."""


@pytest.fixture
def plain(engine_path: Path, tiny: TinyModels) -> Iterator[LiveEngine]:
    with live_engine(engine_path, tiny.model("llama-dense"), *OPTIONS) as live:
        yield live


@pytest.fixture
def on_own_disk(engine_path: Path, tiny: TinyModels, tmp_path: Path) -> Iterator[LiveEngine]:
    """An engine whose directory is a file system of its own."""
    directory, start = tmp_path / "slots", tmp_path / "start"
    directory.mkdir()
    words = ["unshare", "--mount", "--propagation", "private"]
    words += ["mount", "-t", "tmpfs", "none", str(directory)]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"the kernel refuses a mount: {tried.stderr.strip()}")
    start.write_text(
        IN_OWN_MOUNTS.replace("DIRECTORY", str(directory)).replace("ENGINE", str(engine_path))
    )
    start.chmod(0o700)
    own = (*OPTIONS, "--slot-save-path", str(directory))
    with live_engine(start, tiny.model("llama-dense"), *own) as live:
        live.slot_files = Path(f"/proc/{live.process.pid}/root{directory}")
        yield live


@pytest.mark.usefixtures("engine_path", "tiny")  # of either engine, which is got by its name
@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_costs_nothing_and_once_it_is_lifted_all_works(
    request: pytest.FixtureRequest, limit: str
) -> None:
    engine, limited, status, reason = LIMITS[limit]
    live: LiveEngine = request.getfixturevalue(engine)
    small = converse(live, 1, 0, N_SMALL)
    assert live.file(1, "save", "a").status == 200
    big = converse(live, 0, 1, N_BIG)
    assert live.page(0, "page_out", "fox").status == 200
    hold(live, 0, 1, N_BIG)
    before = contents(live.slot_files)
    with limited(live):
        with streams(live) as beside:
            load = beside.start(prompt=[5, 6, 7], n_predict=256, ignore_eos=True, id_slot=1)
            load.reach(1)
            refused(live.spill("fox", filename="a", drop=True), status, reason)
            refused(live.spill("fox"), status, reason)
            refused(live.file(0, "save", "a"), status, reason)
            assert load.result()["tokens_predicted"] == 256
        assert contents(live.slot_files) == before
        assert names(live) == ["fox"]
        assert live.metric("page_failed_total") == 3
        assert live.file(1, "restore", "a").receipt["lost"] == []
        assert go_on(live, 1, small.said) == small.control
        assert go_on(live, 0, big.said) == big.control
    hold(live, 0, 1, N_BIG)
    assert live.spill("fox", filename="a", drop=True).receipt["dropped"]
    assert live.file(0, "save", "b").status == 200
    assert set(contents(live.slot_files)) == {"a", "a.ckpt", "b", "b.ckpt"}
    for name in ("a", "b"):
        assert live.file(1, "restore", name).receipt["lost"] == []
        assert go_on(live, 1, big.said) == big.control


# A place that is taken

OBSTACLES: dict[str, Callable[[Path, Path], object]] = {
    "directory": lambda path, _: path.mkdir(),
    "symlink to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "symlink to a directory": lambda path, outside: path.symlink_to(outside),
    "symlink to nothing": lambda path, outside: path.symlink_to(outside / "new"),
    "fifo": lambda path, _: os.mkfifo(path),
}
TAKEN = [
    *((place, obstacle) for place in ("a", "a.ckpt") for obstacle in OBSTACLES),
    *(("a.page-staging", obstacle) for obstacle in OBSTACLES if obstacle != "directory"),
    *((".page-lock", obstacle) for obstacle in OBSTACLES if obstacle.startswith("symlink")),
]


@pytest.mark.parametrize(("place", "obstacle"), TAKEN)
def test_a_place_that_is_taken_is_neither_followed_nor_replaced(
    plain: LiveEngine, tmp_path: Path, place: str, obstacle: str
) -> None:
    live = plain
    (tmp_path / "file").write_bytes(b"of somebody else")
    small = converse(live, 1, 0, N_SMALL)
    for name in ("a", "b"):
        assert live.file(1, "save", name).status == 200
    big = converse(live, 0, 1, N_BIG)
    assert live.page(0, "page_out", "fox").status == 200
    hold(live, 0, 1, N_BIG)

    taken, aside = live.slot_files / place, tmp_path / "aside"
    if taken.exists():
        taken.rename(aside)
    OBSTACLES[obstacle](taken, tmp_path)
    kind, before = stat.S_IFMT(taken.lstat().st_mode), contents(live.slot_files)
    outside = contents(tmp_path)
    for answer in (
        live.spill("fox", filename="a", drop=True),
        live.file(0, "save", "a"),
        live.file(1, "restore", "a"),
    ):
        assert place in refused(answer, 500, "files_failed")["message"]
    assert stat.S_IFMT(taken.lstat().st_mode) == kind
    assert (contents(live.slot_files), contents(tmp_path)) == (before, outside)
    assert names(live) == ["fox"]
    assert go_on(live, 1, small.said) == small.control
    assert go_on(live, 0, big.said) == big.control

    taken.rmdir() if obstacle == "directory" else taken.unlink()
    if aside.exists():
        aside.rename(taken)
    for name, talk in (("a", small), ("b", small)):
        assert live.file(1, "restore", name).receipt["lost"] == []
        assert go_on(live, 1, talk.said) == talk.control
    assert live.spill("fox", filename="a", drop=True).receipt["dropped"]
    assert live.file(1, "restore", "a").receipt["lost"] == []
    assert go_on(live, 1, big.said) == big.control


# A directory that goes


def spilled_while_the_directory_goes(
    live: LiveEngine, pool: ThreadPoolExecutor, gone: Path
) -> Answer:
    spilling = pool.submit(live.spill, "fox")
    until(lambda: spilling.done() or [*live.slot_files.glob("fox.page-staging/*/fox")])
    live.slot_files.rename(gone)  # at once, not file by file
    shutil.rmtree(gone)
    return spilling.result()


def test_a_directory_that_goes_in_the_middle_of_a_spill_costs_nothing(
    plain: LiveEngine, tmp_path: Path
) -> None:
    live = plain
    small = converse(live, 0, 0, N_SMALL)
    huge = converse(live, 1, 1, N_HUGE)
    assert live.page(1, "page_out", "fox").status == 200
    load = {"prompt": [5, 6, 7], "id_slot": 1, "n_predict": -1, "ignore_eos": True}
    with streaming_socket(live, **load), ThreadPoolExecutor(1) as pool:
        for _ in range(TRIES):
            answer = spilled_while_the_directory_goes(live, pool, tmp_path / "gone")
            assert not live.slot_files.exists()
            live.slot_files.mkdir()
            if answer.status != 200:
                break
    until(lambda: not any(slot["is_processing"] for slot in live.slots()))
    refused(answer, 500, "files_failed")
    assert contents(live.slot_files) == {}
    assert names(live) == ["fox"]
    assert go_on(live, 0, small.said) == small.control
    assert live.spill("fox", drop=True).receipt["dropped"]
    assert set(contents(live.slot_files)) == {"fox", "fox.ckpt"}
    assert live.file(1, "restore", "fox").receipt["lost"] == []
    assert go_on(live, 1, huge.said) == huge.control
