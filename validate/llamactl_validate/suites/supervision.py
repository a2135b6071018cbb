"""Whatever is killed or hangs, the daemon or its engine: what can be kept is, the rest is told."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import CarryFate, LifecycleResult

from llamactl_validate.conversations import TEXTS, go_on, hold, tokens_of, undisturbed
from llamactl_validate.engine import N_CTX
from llamactl_validate.expecting import Failed, Skipped, expect, expect_that, until
from llamactl_validate.scenario import Trial, scenario
from llamactl_validate.streams import Stream

if TYPE_CHECKING:
    from llamactl_validate.asked import Json
    from llamactl_validate.daemon import Daemon

SAVED, PAGE = "saved", "page"
WEDGE_IDLE_S = 3.0
"""A tenth of what a daemon waits where nobody says otherwise."""
CHUNKS_BEFORE = 5
"""Of a stream, before something is done to the engine or the daemon."""
TALE = "Once upon a time there was a lighthouse keeper who kept a fox. Every evening"
ENDLESS: Json = {"prompt": TALE, "n_predict": 2000, "temperature": 0, "ignore_eos": True}
LASTING = 1000
"""Tokens that are not written before the engine or its daemon has ended."""
TOO_FAST = "an answer comes to its end before the daemon can be killed"


@scenario(
    "an engine that is killed is loaded again; what is in files comes back",
    n_steps=(200, 200),
    n_loads=(2, 2),
    slot_tokens=LASTING,
)
def crash(trial: Trial) -> None:
    """The rest of what it held is lost, and that is said: no slot and no page pretends."""
    with ThreadPoolExecutor(1) as pool, trial.daemon() as daemon:
        live = daemon.engine()
        control = trial.control(lambda: undisturbed(live, 0, TEXTS[0]))
        said = hold(live, 0, TEXTS[0])
        daemon.done(daemon.client.page_save(0, SAVED))
        hold(live, 1, TEXTS[1])
        daemon.done(daemon.client.page_out(PAGE, 1))
        stream = Stream(live, ENDLESS | {"id_slot": 1}, pool)
        stream.reach(CHUNKS_BEFORE)
        trial.now("the kill")
        began = time.monotonic()
        pid = daemon.signal_engine(signal.SIGKILL).pid
        _breaks(stream)
        status = daemon.until_generation(2)
        trial.measure("out of service", time.monotonic() - began, "s")
        trial.now("the engine after it")
        live = daemon.engine()
        expect("crashes, and loads", (status.crashes, status.weight_loads), (1, 2))
        _loaded_for(daemon, "up", "crash")
        record = _record(daemon)
        expect("the pid of the record", record["pid"], pid)
        expect("the signal of the record", record["exit"]["signal"], signal.SIGKILL)
        expect("tokens of its context, by the record", record["geometry"]["n_ctx"], N_CTX)
        expect_that("the record has its last words", bool(record["exit"]["last_lines"]))
        expect("tokens in its slots", [live.held(0), live.held(1)], [0, 0])
        expect("what is said of the page", _refusal(daemon, PAGE), "unknown_page")
        daemon.done(daemon.client.page_restore(SAVED, 0))
        expect("what goes on with what was saved", go_on(live, 0, said), control)


def _loaded_for(daemon: Daemon, *causes: str) -> None:
    """See that the ledger has these loads; a line of it may come after what it tells of."""
    until(
        f"the ledger has {len(causes)} loads",
        lambda: len(daemon.loads()) >= len(causes),
        within_s=daemon.patience_s,
    )
    expect("why weights were loaded, by the ledger", daemon.loads(), [*causes])


def _breaks(stream: Stream) -> None:
    """See that a stream does not end as if its answer was whole."""
    try:
        stream.result()
    except httpx.TransportError:
        return
    raise Failed("a stream whose engine was ended came to its end")


def _record(daemon: Daemon) -> dict[str, Any]:
    """Return the newest crash record."""
    path = until(
        "there is a crash record",
        lambda: daemon.status().crash_record or "",
        within_s=daemon.patience_s,
    )
    record: dict[str, Any] = json.loads(Path(path).read_text())
    return record


def _refusal(daemon: Daemon, page: str) -> str:
    """Return why a page cannot be had."""
    try:
        daemon.done(daemon.client.page_in(page, 1))
    except LlamactlError as exc:
        return exc.code
    raise Failed(f"page {page} was placed, which nothing holds")


@scenario(
    "an engine that hangs is found, and replaced",
    n_steps=(60, 60),
    n_loads=(2, 2),
    slot_tokens=LASTING,
)
def wedge(trial: Trial) -> None:
    """It is stopped from outside in the middle of an answer; the record says what proved it."""
    with ThreadPoolExecutor(1) as pool, trial.daemon(wedge_idle_s=WEDGE_IDLE_S) as daemon:
        stream = Stream(daemon.engine(), ENDLESS, pool)
        stream.reach(CHUNKS_BEFORE)
        trial.now("the stop")
        began = time.monotonic()
        engine = daemon.signal_engine(signal.SIGSTOP)
        gone_within_s = WEDGE_IDLE_S + daemon.patience_s
        until("the engine is ended", lambda: not engine.is_running(), within_s=gone_within_s)
        _breaks(stream)
        trial.measure("found and ended", time.monotonic() - began, "s")
        status = daemon.until_generation(2)
        trial.measure("out of service", time.monotonic() - began, "s")
        trial.now("the engine after it")
        expect("crashes, and loads", (status.crashes, status.weight_loads), (1, 2))
        _loaded_for(daemon, "up", "wedge")
        record = _record(daemon)
        expect("the record", (record["pid"], record["code"]), (engine.pid, "engine_wedged"))
        evidence = record["evidence"]
        expect("whether it was stopped from outside", evidence["is_stopped"], True)
        idle_s = evidence["idle_s"]
        expect_that(f"it had been idle for {WEDGE_IDLE_S:g} s", idle_s >= WEDGE_IDLE_S, idle_s)
        answer = daemon.engine().ask("/completion", prompt=TALE, n_predict=2, ignore_eos=True)
        expect("tokens of an answer", answer.receipt["tokens_predicted"], 2)


@scenario(
    "an engine serves on without its daemon, and the next daemon adopts it",
    n_steps=(350, 1300),
    n_loads=(1, 1),
)
def adoption(trial: Trial) -> None:
    """The daemon is killed in the middle of an answer, which comes to its end all the same."""
    with ThreadPoolExecutor(1) as pool, trial.daemon() as daemon:
        live = daemon.engine()
        body: Json = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "id_slot": 0}
        body |= {"prompt": tokens_of(live, TALE), "n_predict": trial.number(110, 400)}
        control = trial.control(lambda: Stream(live, body, pool).text)
        stream = Stream(live, body, pool)
        stream.reach(CHUNKS_BEFORE)
        trial.now("the kill of the daemon")
        pid = daemon.running().pid
        daemon.kill()
        if stream.ended:
            raise Skipped(TOO_FAST)
        beside = live.ask("/completion", prompt=TALE, n_predict=2, ignore_eos=True, id_slot=1)
        expect("tokens of an answer without a daemon", beside.receipt["tokens_predicted"], 2)
        trial.now("the next daemon")
        daemon.start()
        status = daemon.until_generation(1)
        adopted = daemon.running()
        expect("the engine, and whether it is adopted", (adopted.pid, adopted.adopted), (pid, True))
        expect("what the stream wrote", stream.text, control)
        trial.measure("characters compared", len(control))
        expect("loads, by the engine", live.props()["n_weight_loads"], 1)
        expect("crashes, and loads", (status.crashes, status.weight_loads), (0, 1))
        _loaded_for(daemon, "up")


@scenario(
    "a restart carries every conversation over, and none is computed again",
    n_steps=(300, 300),
    n_loads=(2, 2),
)
def restart(trial: Trial) -> None:
    """Two in slots and one in a page go into the next engine; each goes on as if nothing was."""
    with trial.daemon() as daemon:
        live = daemon.engine()
        texts = {0: TEXTS[0], 1: TEXTS[1] + TEXTS[2]}
        paged, controls = TEXTS[3], {}
        for slot, text in texts.items():
            controls[slot] = trial.control(lambda: undisturbed(live, slot, text))  # noqa: B023
        of_the_page = trial.control(lambda: undisturbed(live, 1, paged))
        in_the_page = hold(live, 1, paged)
        daemon.done(daemon.client.page_out(PAGE, 1))
        said = {slot: hold(live, slot, text) for slot, text in texts.items()}
        trial.now("the restart")
        began = time.monotonic()
        ended = daemon.done(daemon.client.restart()).result
        trial.measure("restart", time.monotonic() - began, "s")
        if not isinstance(ended, LifecycleResult) or ended.carried is None:
            raise Failed(f"it tells of no conversation: {ended}")
        fates = {each.what: (each.fate, each.place) for each in ended.carried.conversations}
        places = ("slot 0", "slot 1", f"page {PAGE}")
        expect("what became of each", fates, {each: (CarryFate.BACK, each) for each in places})
        trial.now("the engine after it")
        live = daemon.engine()
        for slot, control in controls.items():
            expect(f"what goes on in slot {slot}", go_on(live, slot, said[slot]), control)
        daemon.done(daemon.client.page_in(PAGE, 1))
        expect("what goes on from the page", go_on(live, 1, in_the_page), of_the_page)
        trial.measure("tokens carried", sum(each.n_tokens for each in ended.carried.conversations))
        _loaded_for(daemon, "up", "restart")
        status = daemon.status()
        expect("crashes, and conversations in files", (status.crashes, status.in_files), (0, 0))
        files = [path.name for path in daemon.paths.pages.glob("[!.]*")]
        expect("files that are left", files, [])
