"""Many changes under load, real engine: nothing is lost, nothing is mixed up, nothing grows."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from live_engine import Answer, LiveEngine, live_engine
from sandbox import WITHIN_S, until
from streams import streaming_socket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

N_CYCLES = 100
N_REQUESTS, N_CHANGES = 200, 50
N_OPERATIONS, N_PAGE_OPERATIONS, N_CONVERSATIONS = 300, 500, 8
BODY = {"n_predict": 8, "temperature": 0, "ignore_eos": True}
BEGINNINGS = (
    "The lighthouse keeper walked down to the shore and",
    "Water begins to boil when",
    "A recipe for bread: take flour, salt and",
    "In the year of the great storm the miller",
)


@pytest.fixture
def engine(engine_path: Path, model_path: Path) -> Iterator[LiveEngine]:
    options = ("--cache-ram", "0", "--parallel", "4", "--ctx-size", "8192", "--metrics")
    with live_engine(engine_path, model_path, *options) as live:
        yield live


def resident(process: psutil.Process) -> int:
    """Return resident bytes, counted page by page: the running count is off by megabytes."""
    return sum(mapping.rss for mapping in process.memory_maps(grouped=True))


def test_a_hundred_cycles_change_nothing_and_grow_nothing(
    engine: LiveEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the states are parked and placed in each cycle, the other half is moved."""

    def converse(said: tuple[str, ...]) -> list[Any]:
        return [
            engine.ask("/completion", **BODY, prompt=begin + more, id_slot=slot).receipt
            for slot, (begin, more) in enumerate(zip(BEGINNINGS, said, strict=True))
        ]

    first = tuple(f"{answer['content']} and then" for answer in converse(("",) * 4))
    control = converse(first)
    engine.erase()
    assert converse(("",) * 4)[3]["content"] + " and then" == first[3]

    process = psutil.Process(engine.process.pid)
    seen: list[tuple[int, int, int]] = []
    for cycle in range(N_CYCLES):
        small = engine.reconfigure(n_ctx=1024 + 512 * (cycle % 3), n_seq=2).receipt
        assert [parked["slot"] for parked in small["parked"]] == [2, 3]
        large = engine.reconfigure(n_ctx=8192 + 4096 * (cycle % 5), n_seq=4 + cycle % 2).receipt
        assert (large["parked"], large["n_weight_loads"]) == ([], 1)
        assert len(large["slots"]) == 4
        seen.append((resident(process), process.num_fds(), process.num_threads()))

    settled = max(rss for rss, _, _ in seen[:10])
    highest = max(rss for rss, _, _ in seen[10:])
    with capsys.disabled():
        sys.stdout.write(
            f"\n{N_CYCLES} cycles: resident {settled / 1e6:.1f} MB after ten, at most "
            f"{highest / 1e6:.1f} MB later; files {seen[9][1]}, {seen[-1][1]}\n"
        )
    assert highest <= settled * 1.01
    assert len({threads for _, _, threads in seen[10:]}) == 1
    # the connection of the last answer may still be closing
    until(lambda: process.num_fds() == min(files for _, files, _ in seen[:10]))

    for answer, undisturbed in zip(converse(first), control, strict=True):
        assert answer["content"] == undisturbed["content"]
        assert answer["timings"]["cache_n"] == undisturbed["timings"]["cache_n"] > 10


def test_requests_across_changes_are_all_answered(engine: LiveEngine) -> None:
    ended = threading.Event()
    slowest_s = 0.0

    def watch_health() -> None:
        nonlocal slowest_s
        while not ended.wait(0.02):
            started = time.monotonic()
            assert engine.unix.get("/health").status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - started)

    def complete(n: int) -> str:
        body = BODY | {"prompt": f"Count to ten: {n}, {n + 1},"}
        if n % 5 == 0:
            hang_up_on(engine, n)
            return "cancelled"
        if n % 2:
            *_, last = engine.events("/completion", body)
        else:
            last = engine.ask("/completion", **body).receipt
        assert last["tokens_predicted"] == BODY["n_predict"]
        return "answered"

    with ThreadPoolExecutor(14) as pool:
        health = pool.submit(watch_health)
        try:
            answers = [pool.submit(complete, n) for n in range(N_REQUESTS)]
            # the last change has a place for all that the ones before it may have parked
            for n in range(N_CHANGES):
                n_seq = 16 if n == N_CHANGES - 1 else 1 + n * 7 % 9
                receipt = engine.reconfigure(n_ctx=512 * n_seq, n_seq=n_seq).receipt
                assert receipt["outcome"] in ("applied", "unchanged")
            outcomes = [answer.result(WITHIN_S * 4) for answer in answers]
        finally:
            ended.set()
        health.result(WITHIN_S)
    assert outcomes.count("answered") == N_REQUESTS * 4 // 5
    assert slowest_s < 1
    assert engine.props()["n_weight_loads"] == 1
    assert engine.props()["parked"] == []


def hang_up_on(live: LiveEngine, n: int) -> None:
    """Ask for a long answer and close the connection after its first bytes."""
    with streaming_socket(live, prompt=f"Tell me about the number {n}", n_predict=500):
        pass


def test_no_conversation_ever_sees_the_secret_of_another(engine: LiveEngine) -> None:
    chance = random.Random(20)
    secrets = [str(chance.randrange(10**5, 10**6)) for _ in range(N_CONVERSATIONS)]
    told = [f"key {secret} key {secret} key {secret} key" for secret in secrets]
    locks = [threading.Lock() for _ in secrets]
    n_recalled = 0

    def ask(who: int) -> None:
        nonlocal n_recalled
        with locks[who]:
            answer = engine.ask(
                "/completion", **BODY, prompt=told[who], id_slot=who, cache_prompt=True
            ).receipt
            others = [secret for n, secret in enumerate(secrets) if n != who]
            assert not any(other in answer["content"] for other in others), answer
            n_recalled += secrets[who] in answer["content"]
            told[who] = f"{told[who]} {secrets[who]} key"[-160:]

    def change() -> None:
        n_seq = chance.randint(1, 10)
        answer = engine.reconfigure(
            n_ctx=n_seq * chance.choice((256, 512, 1024)),
            n_seq=n_seq,
            kv_unified=chance.random() < 0.3,
        )
        assert answer.status == 200, answer.body

    with ThreadPoolExecutor(4) as pool:
        running = []
        for n in range(N_OPERATIONS):
            if n % 3 == 0:
                change()
            elif n % 10 == 1:
                running.append(pool.submit(hang_up_on, engine, n))
            else:
                running.append(pool.submit(ask, chance.randrange(N_CONVERSATIONS)))
        engine.reconfigure(n_ctx=32 * 1024, n_seq=32, kv_unified=False)
        for each in running:
            each.result(WITHIN_S * 4)
    assert n_recalled > len(running) // 2, "the model does not repeat its own key either"
    assert engine.props()["parked"] == []


class Canaries:
    """Conversations that each know one secret, moved about at random between slots and pages."""

    def __init__(self, engine: LiveEngine) -> None:
        self.engine = engine
        self.done: Counter[str] = Counter()
        self._chance = random.Random(4)
        self._secrets = [str(self._chance.randrange(10**5, 10**6)) for _ in range(N_CONVERSATIONS)]
        self._in_files: set[str] = set()

    def operate(self, n: int) -> None:
        """Do one thing; every refusal must be one that is expected."""
        who = self._chance.randrange(N_CONVERSATIONS)
        slot = self._chance.randrange(self.engine.geometry()["n_seq"])
        name = f"of-{who}"
        match n % 8:
            case 0:
                n_seq = self._chance.randint(2, 5)
                self._count("reconfigure", self.engine.reconfigure(n_ctx=1024 * n_seq, n_seq=n_seq))
            case 1:
                hang_up_on(self.engine, n)
            case 2 | 3:
                self._count("page_out", self.engine.page(slot, "page_out", name), "empty_slot")
            case 4:
                spilled = self.engine.spill(name, drop=self._chance.random() < 0.5)
                if self._count("spill", spilled, "unknown_page"):
                    self._in_files.add(name)
            case 5 if name in self._in_files:
                assert self._count("restore", self.engine.file(slot, "restore", name))
                self._recall(who, slot)
            case _:
                self._count("page_in", self.engine.page(slot, "page_in", name), "unknown_page")
                self._recall(who, slot)

    def _recall(self, who: int, slot: int) -> None:
        told = f"key {self._secrets[who]} key {self._secrets[who]} key {self._secrets[who]} key"
        answer = self.engine.ask("/completion", **BODY, prompt=told, id_slot=slot).receipt
        others = [secret for other, secret in enumerate(self._secrets) if other != who]
        assert not any(other in answer["content"] for other in others), answer
        self.done["recall"] += self._secrets[who] in answer["content"]

    def _count(self, verb: str, answer: Answer, *refusals: str) -> bool:
        if answer.status != 200:
            assert answer.error["reason"] in refusals, answer.body
            return False
        self.done[verb] += 1
        return True

    def check(self) -> None:
        """Bytes in the metrics are those of the pages."""
        listed = self.engine.pages()
        assert self.engine.metric("page_store_bytes") == sum(page["n_bytes"] for page in listed)
        assert self.engine.metric("page_store_pages") == len(listed)
        assert self.engine.metric("page_spill_total") == self.done["spill"]

    def drop_all(self) -> None:
        """Free every page."""
        for page in self.engine.pages():
            assert self.engine.page(0, "page_drop", page["name"]).status == 200
        assert self.engine.pages() == []


def test_pages_in_and_out_lose_nothing_and_give_everything_back(engine: LiveEngine) -> None:
    """Every conversation is in a slot, a page or a file, or was replaced by name; none mixes."""
    canaries = Canaries(engine)
    process = psutil.Process(engine.process.pid)
    base = 0
    for n in range(N_PAGE_OPERATIONS):
        canaries.operate(n)
        canaries.check()
        if n == N_PAGE_OPERATIONS // 3:
            canaries.drop_all()
            base = resident(process)
    assert min(canaries.done.values()) > 20, canaries.done
    assert canaries.done["recall"] > N_PAGE_OPERATIONS // 4
    canaries.drop_all()
    assert resident(process) < base * 1.05
