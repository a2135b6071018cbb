"""No conversation ever sees what another one was told, wherever both have been."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil

from llamactl_validate.expecting import Skipped, expect, expect_that
from llamactl_validate.scenario import Trial, scenario
from llamactl_validate.streams import hang_up
from llamactl_validate.suites.cycles import FOUR, resident

if TYPE_CHECKING:
    from llamactl_validate.asked import Answer
    from llamactl_validate.engine import Engine

N_CONVERSATIONS = 8
BODY = {"n_predict": 8, "temperature": 0, "ignore_eos": True}
TOLD_CHARS_MAX = 160
GROWTH_MAX = 1.05
NO_RECALL = "the model does not repeat its own key, so that silence about others shows nothing"


def secrets(chance: random.Random) -> list[str]:
    """Return a number for each conversation."""
    return [str(chance.randrange(10**5, 10**6)) for _ in range(N_CONVERSATIONS)]


def keep_apart(content: str, whose: int, all_of_them: list[str]) -> bool:
    """Say whether an answer has the key of its own conversation; it must have no other."""
    for who, secret in enumerate(all_of_them):
        if who != whose:
            leak = f"conversation {whose} does not see the key of {who}"
            expect_that(leak, secret not in content, content)
    return all_of_them[whose] in content


@scenario(
    "no conversation sees another one's key across changes", n_steps=(450, 2200), slot_tokens=170
)
def canaries_across_changes(trial: Trial) -> None:
    """Eight conversations that each know one key, in slots that come and go."""
    n_operations = trial.number(45, 300)
    chance = random.Random(20)
    keys = secrets(chance)
    told = [f"key {key} key {key} key {key} key" for key in keys]
    locks = [threading.Lock() for _ in keys]
    recalled: list[bool] = []
    with trial.engine(*FOUR) as live:

        def ask(who: int) -> None:
            with locks[who]:
                body = BODY | {"prompt": told[who], "id_slot": who, "cache_prompt": True}
                content = live.ask("/completion", **body).receipt["content"]
                recalled.append(keep_apart(content, who, keys))
                told[who] = f"{told[who]} {keys[who]} key"[-TOLD_CHARS_MAX:]

        def change() -> None:
            n_seq = chance.randint(1, 10)
            n_ctx = n_seq * chance.choice((256, 512, 1024))
            unified = chance.random() < 0.3
            answer = live.reconfigure(n_ctx=n_ctx, n_seq=n_seq, kv_unified=unified)
            expect("the status of a change", answer.status, 200)

        with ThreadPoolExecutor(4) as pool:
            running = []
            for n in range(n_operations):
                trial.now(f"operation {n + 1} of {n_operations}")
                if n % 3 == 0:
                    change()
                elif n % 10 == 1:
                    running.append(pool.submit(hang_up, live, n))
                else:
                    running.append(pool.submit(ask, chance.randrange(N_CONVERSATIONS)))
            live.reconfigure(n_ctx=32 * 1024, n_seq=32, kv_unified=False)
            trial.now("the last answers")
            for each in running:
                each.result(live.patience_s * 4)
        expect("what is still parked", live.props()["parked"], [])
    trial.measure("answers", len(recalled))
    trial.measure("with their own key", sum(recalled))
    if sum(recalled) <= len(recalled) // 2:
        raise Skipped(NO_RECALL)


class Canaries:
    """Conversations that each know one key, moved about at random between slots and pages."""

    def __init__(self, live: Engine) -> None:
        self.live = live
        self.done: Counter[str] = Counter()
        self._chance = random.Random(4)
        self._keys = secrets(self._chance)
        self._in_files: set[str] = set()
        self._spilled_before = live.metric("page_spill_total")

    def operate(self, n: int) -> None:
        """Do one thing; every refusal must be one that is expected."""
        who = self._chance.randrange(N_CONVERSATIONS)
        slot = self._chance.randrange(self.live.geometry()["n_seq"])
        name = f"of-{who}"
        match n % 8:
            case 0:
                n_seq = self._chance.randint(2, 5)
                self._count("reconfigure", self.live.reconfigure(n_ctx=1024 * n_seq, n_seq=n_seq))
            case 1:
                hang_up(self.live, n)
            case 2 | 3:
                self._count("page_out", self.live.page(slot, "page_out", name), "empty_slot")
            case 4:
                spilled = self.live.spill(name, drop=self._chance.random() < 0.5)
                if self._count("spill", spilled, "unknown_page"):
                    self._in_files.add(name)
            case 5 if name in self._in_files:
                self._count("restore", self.live.file(slot, "restore", name))
                self._recall(who, slot)
            case _:
                self._count("page_in", self.live.page(slot, "page_in", name), "unknown_page")
                self._recall(who, slot)

    def _recall(self, who: int, slot: int) -> None:
        told = f"key {self._keys[who]} key {self._keys[who]} key {self._keys[who]} key"
        answer = self.live.ask("/completion", **BODY, prompt=told, id_slot=slot).receipt
        self.done["answer"] += 1
        self.done["recall"] += keep_apart(answer["content"], who, self._keys)

    def _count(self, verb: str, answer: Answer, *refusals: str) -> bool:
        if answer.status != 200:
            reason = answer.error["reason"]
            expect_that(f"{verb} is taken, or refused for {refusals}", reason in refusals, reason)
            return False
        self.done[verb] += 1
        return True

    def check(self) -> None:
        """Bytes in the metrics are those of the pages."""
        listed = self.live.pages()
        n_bytes = sum(page["n_bytes"] for page in listed)
        expect("bytes in the metrics", self.live.metric("page_store_bytes"), n_bytes)
        expect("pages in the metrics", self.live.metric("page_store_pages"), len(listed))
        spilled = self.live.metric("page_spill_total") - self._spilled_before
        expect("spills in the metrics", spilled, self.done["spill"])

    def drop_all(self) -> None:
        """Free every page."""
        for page in self.live.pages():
            dropped = self.live.page(0, "page_drop", page["name"])
            expect("the status of a drop", dropped.status, 200)
        expect("pages that are left", self.live.pages(), [])


@scenario(
    "no conversation sees another one's key across pages and files, and all memory comes back",
    n_steps=(500, 2500),
    slot_tokens=50,
)
def canaries_across_pages(trial: Trial) -> None:
    """Each is in a slot, a page or a file, or was replaced by name; none mixes."""
    n_operations, often = trial.number(120, 500), trial.number(1, 20)
    with trial.engine(*FOUR) as live:
        canaries = Canaries(live)
        process = psutil.Process(live.process.pid)
        base = 0
        for n in range(n_operations):
            trial.now(f"operation {n + 1} of {n_operations}")
            canaries.operate(n)
            canaries.check()
            if n == n_operations // 3:
                canaries.drop_all()
                base = resident(process)
        trial.now("what is left after the operations")
        for verb, n_done in canaries.done.items():
            trial.measure(verb.replace("_", " "), n_done)
        canaries.drop_all()
        grown = resident(process)
        within = f"the memory stays within {GROWTH_MAX:.0%} of what it was"
        expect_that(within, grown < base * GROWTH_MAX, f"{base} B, then {grown} B")
        done = {verb: n for verb, n in canaries.done.items() if verb != "recall"}
        expect_that(f"each was done more than {often} times", min(done.values()) > often, done)
        if canaries.done["recall"] <= canaries.done["answer"] // 2:
            raise Skipped(NO_RECALL)
