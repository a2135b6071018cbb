"""What a smaller geometry has no place for is parked whole, named, and placed back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llamactl_validate.conversations import (
    GREEDY,
    NUMBERS,
    SAMPLED,
    TEXTS,
    go_on,
    hold,
    tokens_of,
    undisturbed,
)
from llamactl_validate.engine import N_CTX, N_SEQ, Engine
from llamactl_validate.expecting import Skipped, expect, expect_that, until
from llamactl_validate.scenario import Trial, scenario
from llamactl_validate.streams import streaming_socket, streams

if TYPE_CHECKING:
    from llamactl_validate.asked import Json

LONG: Json = GREEDY | {"n_predict": 100, "cache_prompt": False, "n_probs": 0}
SMALL = 512
"""Tokens of a geometry whose slots cannot hold a long conversation."""
N_LONG = 400
LASTING = 1000
"""Tokens that are not written before a client has hung up."""


@scenario("a slot past the last one is parked, and comes back to its place", n_steps=(120, 120))
def past_the_last_slot(trial: Trial) -> None:
    """Receipt, /pages, /props, /slots and metrics tell the same of it."""
    with trial.engine() as live:
        control = trial.control(lambda: undisturbed(live, 1, TEXTS[0]))
        said = hold(live, 1, TEXTS[0])
        held = live.held(1)
        trial.now("one slot less")
        receipt = live.applied(n_seq=1)
        parked = {
            "slot": 1,
            "tokens_held": held,
            "tokens_fit": 0,
            "reason": "n_seq",
            "running": False,
        }
        expect("who is parked", receipt["parked"], [parked])
        fates = [{"slot": 1, "tokens": held, "fate": "parked"}]
        expect("what became of the slots", receipt["slots"], fates)
        expect("tokens held", receipt["tokens_held"], held)
        (page,) = live.pages()
        told = {name: page[name] for name in ("slot", "n_tokens", "reason", "parked", "running")}
        is_parked = {"slot": 1, "n_tokens": held, "reason": "n_seq"}
        expect("the page", told, is_parked | {"parked": True, "running": False})
        expect("its bytes", page["n_bytes"], receipt["bytes_held"])
        expect("/props", live.props()["parked"], [{"page": page["name"], **parked}])
        serving, listed = live.slots()
        expect_that("the slot that serves is not parked", "parked" not in serving)
        expect("/slots", (listed["id"], listed["parked"]), (1, True))
        expect("the metric of parked states", live.metric("parked_states"), 1)
        refused = live.ask("/slots/1?action=erase")
        expect("the status of an erase of what is parked", refused.status, 400)

        trial.now("one slot more")
        receipt = live.applied(n_seq=2)
        placed = [{"slot": 1, "tokens": held, "fate": "placed", "from": 1}]
        expect("what became of the slots", receipt["slots"], placed)
        expect("who is still parked", (receipt["parked"], live.pages()), ([], []))
        expect("the metric of parked states", live.metric("parked_states"), 0)
        expect("what goes on with the conversation", go_on(live, 1, said), control)
        trial.measure("tokens parked", held)
        trial.measure("bytes parked", page["n_bytes"])


@scenario("what a smaller window cannot hold is parked until one can", n_steps=(30, 30))
def window(trial: Trial) -> None:
    """Its slot serves others meanwhile."""
    with trial.engine() as live:
        long = _words(live, N_LONG)
        body = {"prompt": long, "n_predict": 1, "temperature": 0}
        live.ask("/completion", **body, id_slot=1)
        held = live.held(1)
        control = live.ask("/completion", **body, id_slot=1).receipt["timings"]["cache_n"]
        trial.now("a smaller window")
        receipt = live.applied(n_ctx=SMALL)
        fit = live.slots()[0]["n_ctx"]
        parked = {"slot": 1, "tokens_held": held, "tokens_fit": fit, "reason": "window"}
        expect("who is parked", receipt["parked"], [parked | {"running": False}])
        served = live.ask("/completion", prompt=long[:20], n_predict=4, id_slot=1)
        expect("the status of another request in this slot", served.status, 200)
        trial.now("a larger window")
        receipt = live.applied(n_ctx=N_CTX)
        placed = [slot for slot in receipt["slots"] if slot["fate"] == "placed"]
        expect("who is placed", [(each["from"], each["tokens"]) for each in placed], [(1, held)])
        again = live.ask("/completion", **body, id_slot=placed[0]["slot"]).receipt
        expect("tokens that need not be processed again", again["timings"]["cache_n"], control)
        trial.measure("tokens parked", held)


@scenario("a dry run tells who would be parked, and touches nothing", n_steps=(20, 20))
def dry_run(trial: Trial) -> None:
    """The change itself then parks exactly these."""
    with trial.engine() as live:
        hold(live, 1, TEXTS[0])
        before, slots = live.props(), live.slots()
        planned = live.reconfigure(n_seq=1, dry_run=True).receipt
        expect("the outcome", planned["outcome"], "planned")
        expect("/props after a dry run", live.props(), before)
        expect("/slots after a dry run", live.slots(), slots)
        expect("who is parked", live.applied(n_seq=1)["parked"], planned["parked"])
        trial.measure("parked as planned", len(planned["parked"]))


@scenario("a generation that is parked goes on where it was", n_steps=(290, 450))
def generation(trial: Trial) -> None:
    """Changes of the geometry meanwhile make no difference, nor does its neighbour."""
    body = LONG | {"n_predict": trial.number(64, 100)}
    with trial.engine() as live:

        def alone() -> list[str]:
            live.erase()
            return [live.generate(body | {"prompt": [text]}).texts[0] for text in TEXTS[:2]]

        control = trial.control(alone)
        live.erase()
        with streams(live) as running:
            first = running.start(**body | {"prompt": TEXTS[0]}, id_slot=0)
            parked = running.start(**body | {"prompt": TEXTS[1]}, id_slot=1)
            parked.reach(8)
            trial.now("one slot less")
            receipt = live.applied(n_seq=1)
            who = [(each["slot"], each["running"]) for each in receipt["parked"]]
            expect("who is parked", who, [(1, True)])
            stopped_at = receipt["parked"][0]["tokens_held"]
            for n_ctx in (2 * N_CTX, N_CTX // 2, N_CTX):
                (still,) = live.applied(n_ctx=n_ctx)["parked"]
                expect("tokens of the parked generation", still["tokens_held"], stopped_at)
            expect("what its neighbour wrote", first.text, control[0])
            expect_that("it waits", not parked.ended)
            trial.now("slots more")
            receipt = live.applied(n_seq=3)
            expect("who is still parked", receipt["parked"], [])
            placed = {"slot": 1, "tokens": stopped_at, "fate": "placed", "from": 1}
            expect_that("it is placed", placed in receipt["slots"], receipt["slots"])
            expect("what it wrote", parked.text, control[1])
            expect("its slot", parked.result()["id_slot"], 1)
        trial.measure("parked at token", stopped_at)


@scenario("a grammar and a seed go on after parking", n_steps=(350, 350))
def sampler(trial: Trial) -> None:
    """What a sampler has drawn and a grammar has read is not in the state of the model."""
    body = SAMPLED | {"seed": 11, "n_predict": 100, "ignore_eos": False, "json_schema": NUMBERS}
    body |= {"prompt": TEXTS[0], "cache_prompt": False}
    with trial.engine() as live:

        def alone() -> str:
            live.erase()
            return live.generate(body | {"prompt": [TEXTS[0]]}).texts[0]

        control = trial.control(alone)
        live.erase()
        with streams(live) as running:
            stream = running.start(**body, id_slot=1)
            stream.reach(8)
            trial.now("one slot less")
            expect_that("it is parked", live.applied(n_seq=1)["parked"][0]["running"])
            trial.now("one slot more")
            live.applied(n_seq=2)
            expect("what it wrote", stream.text, control)
        trial.measure("characters compared", len(control))


@scenario(
    "a parked generation whose client is gone is freed", n_steps=(20, 20), slot_tokens=LASTING
)
def client_gone(trial: Trial) -> None:
    """Nobody would ever read the rest."""
    with trial.engine() as live:
        with streaming_socket(live, **LONG | {"prompt": TEXTS[0], "n_predict": -1, "id_slot": 1}):
            until("it generates", lambda: _decoded(live, 1) > 4, within_s=live.patience_s)
            trial.now("one slot less")
            expect_that("it is parked", live.applied(n_seq=1)["parked"][0]["running"])
            expect("pages", len(live.pages()), 1)
            expect("the metric of requests that wait", live.metric("requests_deferred"), 1)
        trial.now("its client hangs up")
        began = time.monotonic()
        until("it is freed", lambda: not live.pages(), within_s=live.patience_s)
        trial.measure("freed after", time.monotonic() - began, "s")
        receipt = live.applied(n_seq=N_SEQ)
        expect("what is left of it", (receipt["slots"], receipt["parked"]), ([], []))
        served = live.ask("/completion", prompt=TEXTS[1], n_predict=4, id_slot=1)
        expect("the status of another request in its slot", served.status, 200)


@scenario("a unified cache keeps the conversation that was used last", n_steps=(10, 10))
def pool(trial: Trial) -> None:
    """The other one is parked, and has its place again when there is room."""
    with trial.engine() as live:
        words = _words(live, 200)
        for slot in (1, 0):
            live.ask("/completion", prompt=[*words[slot:], words[0]], n_predict=1, id_slot=slot)
        tokens = [live.held(slot) for slot in (0, 1)]
        receipt = live.applied(n_ctx=256, kv_unified=True)
        if not receipt["parked"] and receipt["geometry"]["n_ctx"] > 256:
            raise Skipped("this model's smallest cache holds both conversations")
        parked = {"slot": 1, "tokens_held": tokens[1], "tokens_fit": 256 - tokens[0]}
        wanted = [parked | {"reason": "pool", "running": False}]
        expect("who is parked", receipt["parked"], wanted)
        trial.now("room again")
        expect("who is parked", live.applied(n_ctx=512, kv_unified=True)["parked"], [])
        trial.measure("tokens parked", tokens[1])


def _words(live: Engine, n_tokens: int) -> list[int]:
    """Return so many tokens."""
    text = tokens_of(live, TEXTS[0])
    return (text * (1 + n_tokens // len(text)))[:n_tokens]


def _decoded(live: Engine, slot: int) -> int:
    n_decoded: int = live.slots()[slot]["next_token"][0]["n_decoded"]
    return n_decoded
