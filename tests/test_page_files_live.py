"""Whoever restores finds one whole generation, whatever kills who writes or writes beside it."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import cycle
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from live_engine import LiveEngine, live_engine
from llamactl_validate.streams import streams
from page_conversations import OPTIONS, converse, go_on, refused
from sandbox import WITHIN_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from live_engine import Answer
    from page_conversations import Conversation
    from tiny_models import TinyModels

    Publish = Callable[[LiveEngine, str, int], Answer]

SEED = 41
N_KILLS = 200
N_CONVERSATIONS = 4
N_TOKENS = 1000
"""Two megabytes of state: under load it takes as long to write them as to start an engine."""
N_KILLS_PER_NAME = 20
"""Then other names take over, so that kills hit first publications too."""
N_HITS_MIN = 3
"""Of each kind of kill. A fifth of them comes into a commit; how many is up to the machine."""
N_SPILLS = 40
"""Of each name by each engine."""
LOAD: dict[str, Any] = {"prompt": [5, 6, 7], "id_slot": 0, "n_predict": -1, "ignore_eos": True}
SUFFIXES = ("", ".ckpt")


class Book:
    """The conversations, and which of them each name may hold."""

    def __init__(self, directory: Path, talks: list[Conversation]) -> None:
        self.directory = directory
        self.talks = talks
        self.may: dict[str, tuple[int | None, ...]] = {}
        """What was published last; while a publication is under way that one too."""
        self._seeds = [self._content(seed(k)) for k in range(len(talks))]
        assert len({content[0] for content in self._seeds}) == len(talks)

    def _content(self, name: str) -> tuple[bytes, ...]:
        return tuple((self.directory / f"{name}{suffix}").read_bytes() for suffix in SUFFIXES)

    def generation(self, name: str) -> int:
        """Return the conversation of which the files of this name are, all of them."""
        content = self._content(name)
        assert content in self._seeds, f"{name} is no whole generation"
        return self._seeds.index(content)

    def publish(self, live: LiveEngine, name: str, k: int, how: Publish) -> None:
        """Publish a conversation under a name; an engine that is gone may have done it or not."""
        (old,) = self.may[name]
        self.may[name] = (old, k)
        answer = how(live, name, k)
        assert answer.status == 200, answer.body
        self.may[name] = (k,)

    def check(self, live: LiveEngine, name: str) -> int | None:
        """Restore a name: it is one of the generations that it may be, to the last bit."""
        may = self.may[name]
        if (self.directory / f"{name}.page-staging" / "commit").exists():
            may = may[-1:]  # a record counts from the moment at which it is there
        answer = live.file(1, "restore", name)
        if answer.status != 200:
            refused(answer, 400, "no_file")
            found = None
        else:
            assert answer.receipt["lost"] == []
            found = self.generation(name)
            assert go_on(live, 1, self.talks[found].said) == self.talks[found].control
        assert found in may, f"{name} went from {may} to {found}"
        self.may[name] = (found,)
        return found

    def page_out(self, live: LiveEngine) -> None:
        """Make a page of each conversation."""
        for k in range(len(self.talks)):
            assert live.file(1, "restore", seed(k)).receipt["lost"] == []
            assert live.page(1, "page_out", page(k)).status == 200


def seed(k: int) -> str:
    return f"seed-{k}"


def page(k: int) -> str:
    return f"page-{k}"


def spill(live: LiveEngine, name: str, k: int) -> Answer:
    return live.spill(page(k), filename=name)


def save(live: LiveEngine, name: str, k: int) -> Answer:
    assert live.file(1, "restore", seed(k)).receipt["lost"] == []
    return live.file(1, "save", name)


def write(live: LiveEngine, book: Book, names: list[str], how: Publish, dice: str) -> int:
    """Publish these names again and again, until the engine is gone; return how often it was."""
    luck = random.Random(dice)
    n_published = 0
    with contextlib.suppress(httpx.TransportError):
        for name in cycle(names):
            others = [k for k in range(N_CONVERSATIONS) if k not in book.may[name]]
            book.publish(live, name, luck.choice(others), how)
            n_published += 1
    return n_published


@pytest.fixture
def words(tiny: TinyModels, tmp_path: Path) -> tuple[Path, list[str]]:
    """The model, and the options of engines that use the same directory."""
    (tmp_path / "slots").mkdir()
    return tiny.model("llama-dense"), [*OPTIONS, "--slot-save-path", str(tmp_path / "slots")]


@pytest.fixture
def book(engine_path: Path, words: tuple[Path, list[str]], tmp_path: Path) -> Book:
    """Every conversation in files of its own, and how it goes on where it was never in files."""
    talks = []
    with live_engine(engine_path, words[0], *words[1]) as live:
        for k in range(N_CONVERSATIONS):
            talks.append(converse(live, 1, k, N_TOKENS))
            assert live.file(1, "save", seed(k)).status == 200
    return Book(tmp_path / "slots", talks)


@contextlib.contextmanager
def mortal_engine(engine: Path, model: Path, *options: str) -> Iterator[LiveEngine]:
    """Yield an engine that may be killed in the block."""
    live = LiveEngine(engine, model, *options)
    try:
        yield live
    finally:
        live.process.kill()
        live.process.wait(WITHIN_S)
        live.tcp.close()
        live.unix.close()
        shutil.rmtree(live.root)


def killed_while_writing(
    live: LiveEngine, book: Book, names: list[str], dice: str, within_s: float
) -> int:
    """Write under load, and kill the engine at some moment; return what was answered till then."""
    *spilled, saved = names
    with streams(live) as beside:
        beside.start(**LOAD).reach(2)
        writers = [
            beside.submit(lambda: write(live, book, spilled, spill, f"{dice} spill")),
            beside.submit(lambda: write(live, book, [saved], save, f"{dice} save")),
        ]
        wait(writers, random.Random(dice).uniform(0, within_s), FIRST_COMPLETED)
        assert live.process.poll() is None, live.log()
        live.process.kill()
        return sum(writer.result(WITHIN_S) for writer in writers)


def measured_spill_s(live: LiveEngine) -> float:
    """Return how long the slower one of some spills under load takes."""
    took = []
    with streams(live) as beside:
        beside.start(**LOAD).reach(2)
        for k in range(N_CONVERSATIONS):
            begin = time.monotonic()
            assert spill(live, "measured", k).status == 200
            took.append(time.monotonic() - begin)
        live.process.kill()
    return max(took)


def phase(directory: Path, pid: int) -> str:
    """Return in what a process was killed, from what it left behind."""
    if any(directory.glob("*.page-staging/commit")):
        return "commit"
    return "staging" if any(directory.glob(f"*.page-staging/{pid}-*")) else "between"


def test_a_kill_at_any_moment_leaves_the_old_generation_or_the_new(
    engine_path: Path, words: tuple[Path, list[str]], book: Book
) -> None:
    """Kill the engine 200 times while it spills and saves; see what the next one restores."""
    model, options = words
    with mortal_engine(engine_path, model, *options) as live:
        book.page_out(live)
        spill_s = measured_spill_s(live)
    phases, found = Counter[str](), Counter[str]()
    names: list[str] = []
    n_published = 0
    for n in range(N_KILLS + 1):
        with mortal_engine(engine_path, model, *options) as live:
            for name in names:
                old = book.may[name][0]
                now = book.check(live, name)
                found["nothing" if now is None else "old" if now == old else "new"] += 1
            if n == N_KILLS:
                break
            if n % N_KILLS_PER_NAME == 0:
                names = [f"{letter}{n}" for letter in "abc"]
                book.may |= dict.fromkeys(names, (None,))
            book.page_out(live)
            dice = f"{SEED} {n}"
            n_published += killed_while_writing(live, book, names, dice, 2 * spill_s)
        phases[phase(book.directory, live.process.pid)] += 1
    assert min(phases["staging"], phases["commit"]) >= N_HITS_MIN, phases
    assert min(found["nothing"], found["old"], found["new"], n_published) >= N_HITS_MIN, found
    with live_engine(engine_path, model, *options) as live:
        for name in book.may:
            book.check(live, name)
            book.publish(live, name, 0, save)
            book.check(live, name)
    published = [*book.may, "measured", *(seed(k) for k in range(N_CONVERSATIONS))]
    left = {entry.name for entry in book.directory.iterdir()} - {".page-lock"}
    assert left == {f"{name}{suffix}" for name in published for suffix in SUFFIXES}


def test_two_engines_that_write_the_same_names_leave_whole_generations(
    engine_path: Path, words: tuple[Path, list[str]], book: Book
) -> None:
    """Two spill what a third restores meanwhile; none of them knows of the others."""
    model, options = words
    names = ["a", "b"]
    with contextlib.ExitStack() as stack:
        *writers, reader = (
            stack.enter_context(live_engine(engine_path, model, *options)) for _ in range(3)
        )
        for live in writers:
            book.page_out(live)
        for name in names:
            assert spill(writers[0], name, 0).status == 200

        def spill_all(live: LiveEngine, dice: str) -> None:
            luck = random.Random(dice)
            for name in names * N_SPILLS:
                answer = spill(live, name, luck.randrange(N_CONVERSATIONS))
                assert answer.status == 200, answer.body

        pool = stack.enter_context(ThreadPoolExecutor(len(writers)))
        ends = [pool.submit(spill_all, live, f"{SEED} {i}") for i, live in enumerate(writers)]
        found = list[int]()
        for name in cycle(names):
            if all(end.done() for end in ends):
                break
            assert reader.file(1, "restore", name).receipt["lost"] == []
            # the files may be others by now: the slot itself says what it was
            assert reader.file(1, "save", "mine").status == 200
            found.append(book.generation("mine"))
            talk = book.talks[found[-1]]
            assert go_on(reader, 1, talk.said) == talk.control
        for end in ends:
            end.result()
    assert set(found) == set(range(N_CONVERSATIONS))
    assert not list(book.directory.glob("*.page-staging"))
    for name in names:
        book.generation(name)
