"""Requests that come while the geometry changes are answered, and changes take their turns."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llamactl_validate.engine import N_CTX
from llamactl_validate.expecting import expect, expect_that, until
from llamactl_validate.scenario import Trial, scenario
from llamactl_validate.streams import hang_up, streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamactl_validate.engine import Engine

FOUR = ("--parallel", "4", "--ctx-size", "8192")
BODY = {"n_predict": 8, "temperature": 0, "ignore_eos": True}
TALE = "Once upon a time there was a fox who lived beside a river. Every morning"
N_CALLERS = 14
CANCELLED_EVERY = 5


class _Health:
    """What /health said, asked again and again."""

    def __init__(self) -> None:
        self.statuses: set[int] = set()
        self.slowest_s = 0.0


@contextmanager
def _watched(live: Engine) -> Iterator[_Health]:
    ended, health = threading.Event(), _Health()

    def watch() -> None:
        while not ended.wait(0.02):
            began = time.monotonic()
            health.statuses.add(live.unix.get("/health").status_code)
            health.slowest_s = max(health.slowest_s, time.monotonic() - began)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield health
        finally:
            ended.set()
        watching.result()


@scenario(
    "every request that comes during changes is answered in full",
    n_steps=(400, 2000),
    slot_tokens=40,
)
def answered(trial: Trial) -> None:
    """Streamed and not, more of them than there are slots; one in five hangs up."""
    n_requests, n_changes = trial.number(40, 200), trial.number(12, 50)
    with trial.engine(*FOUR) as live:

        def complete(n: int) -> str:
            body = BODY | {"prompt": f"Count to ten: {n}, {n + 1},"}
            if n % CANCELLED_EVERY == 0:
                hang_up(live, n)
                return "cancelled"
            if n % 2:
                *_, last = live.events("/completion", body)
            else:
                last = live.ask("/completion", **body).receipt
            expect("tokens of an answer", last["tokens_predicted"], BODY["n_predict"])
            return "answered"

        with _watched(live) as health, ThreadPoolExecutor(N_CALLERS) as pool:
            answers = [pool.submit(complete, n) for n in range(n_requests)]
            # the last change has a place for all that the ones before it may have parked
            for n in range(n_changes):
                trial.now(f"change {n + 1} of {n_changes}")
                n_seq = 16 if n == n_changes - 1 else 1 + n * 7 % 9
                live.reconfigure(n_ctx=512 * n_seq, n_seq=n_seq)
            unanswered = sum(not each.done() for each in answers)
            trial.now("the last answers")
            outcomes = [each.result(live.patience_s * 4) for each in answers]
        n_cancelled = -(-n_requests // CANCELLED_EVERY)
        expect("answers", outcomes.count("answered"), n_requests - n_cancelled)
        trial.measure("requests", n_requests)
        trial.measure("changes", n_changes)
        trial.measure("unanswered at the last change", unanswered)
        trial.measure("slowest health check", health.slowest_s * 1000, "ms")
        expect("what the health checks said", health.statuses, {200})
        expect("how often the weights were loaded", live.props()["n_weight_loads"], 1)
        expect("what is still parked", live.props()["parked"], [])


@scenario(
    "changes that meet are taken one by one, or refused by name", n_steps=(10, 10), slot_tokens=90
)
def changes_that_meet(trial: Trial) -> None:
    """Four callers, until two have met."""
    with trial.engine() as live:

        def change(n: int) -> tuple[int, str]:
            answer = live.reconfigure(n_ctx=N_CTX * (1 + n % 5))
            return answer.status, answer.body.get("outcome") or answer.error["reason"]

        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(change, range(40)))
        counts = {each: outcomes.count(each) for each in set(outcomes)}
        known = {(200, "applied"), (200, "unchanged"), (409, "reconfigure_in_progress")}
        expect_that("no other outcome", counts.keys() <= known, counts)
        expect_that("some are taken", (200, "applied") in counts, counts)
        expect_that("some are refused", (409, "reconfigure_in_progress") in counts, counts)
        trial.measure("taken", counts[200, "applied"])
        trial.measure("refused", counts[409, "reconfigure_in_progress"])
        said = live.ask("/completion", prompt=TALE, **BODY).receipt
        expect("tokens of an answer afterwards", said["tokens_predicted"], BODY["n_predict"])


@scenario(
    "a quiet engine ends what runs, starts nothing, and loses no request",
    n_steps=(300, 300),
    slot_tokens=120,
)
def quiet(trial: Trial) -> None:
    """As it is before an engine is replaced."""
    running, waiting = BODY | {"prompt": TALE, "n_predict": 60}, BODY | {"prompt": TALE[:40]}
    metrics = ("quiet", "requests_deferred")
    with trial.engine() as live:

        def quiesce(is_quiet: bool) -> dict[str, int]:
            told = live.ask("/quiesce", is_quiet=is_quiet).receipt
            expect("whether it is quiet", told["is_quiet"], is_quiet)
            return told

        def answers() -> list[str]:
            live.erase()
            asked = ((0, running), (1, waiting))
            return [
                live.ask("/completion", **body, id_slot=slot).receipt["content"]
                for slot, body in asked
            ]

        control = trial.control(answers)
        live.erase()
        with streams(live) as background:
            stream = background.start(**running, id_slot=0)
            stream.reach(3)
            trial.now("quiet")
            expect("requests at work", quiesce(is_quiet=True)["n_processing"], 1)
            try:
                late = background.submit(
                    lambda: live.ask("/completion", **waiting, id_slot=1).receipt["content"]
                )
                until(
                    "the late request waits",
                    lambda: quiesce(is_quiet=True)["n_waiting"] == 1,
                    within_s=live.patience_s,
                )
                expect("what the running request was answered", stream.text, control[0])
                expect_that("the late request still waits", not late.done())
                told = quiesce(is_quiet=True)
                counts = {"n_processing": 0, "n_parked": 0, "n_waiting": 1, "n_cut": 0}
                expect("the requests", told, counts | {"is_quiet": True})
                expect("the metrics", [live.metric(name) for name in metrics], [1, 1])
            finally:
                quiesce(is_quiet=False)
            trial.now("no longer quiet")
            expect("what the late request was answered", late.result(live.patience_s), control[1])
        expect("the metrics", [live.metric(name) for name in metrics], [0, 0])
        trial.measure("characters compared", sum(map(len, control)))
