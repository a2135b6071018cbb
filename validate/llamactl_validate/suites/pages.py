"""A conversation leaves its slot for a page or a file, and comes back as good as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl_validate.conversations import (
    GREEDY,
    MORE,
    SAMPLED,
    TEXTS,
    Later,
    ask,
    go_on,
    hold,
    tokens_of,
    undisturbed,
)
from llamactl_validate.engine import N_CTX, Engine
from llamactl_validate.expecting import expect
from llamactl_validate.scenario import Trial, scenario
from llamactl_validate.streams import streams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llamactl_validate.asked import Json

WAYS = ("stay", "page", "file")
NAME = "one"
N_LATER = 16


def there_and_back(live: Engine, way: str, text: Sequence[int], asked: Json, n: int) -> list[Later]:
    """Have a conversation leave slot 1 and go into slot 0, then append to it and edit it.

    Another conversation uses slot 1 meanwhile. The way `stay` leaves it where it is.
    """
    live.erase()
    said = [*text, *ask(live, 1, text, asked, n).tokens]
    slot = 1
    reusable = None
    if way != "stay":
        out = live.page(1, "page_out", NAME) if way == "page" else live.file(1, "save", NAME)
        ask(live, 1, text[::-1], asked, n)
        live.erase(1)  # in a unified cache, cells of others change the order of the sums
        back = live.page(0, "page_in", NAME) if way == "page" else live.file(0, "restore", NAME)
        for what in ("n_checkpoints", "n_bytes"):
            expect(what, back.receipt[what], out.receipt[what])
        expect("what was lost", back.receipt.get("lost", []), [])
        slot, reusable = 0, back.receipt["n_reusable"]
    more = tokens_of(live, MORE)
    appended = ask(live, slot, [*said, *more], asked, n)
    if reusable is not None:
        expect("tokens found in the slot", appended.n_reused, reusable)
    return [appended, ask(live, slot, [*said[:-5], *more, *more], asked, n)]


@scenario(
    "a page and a file are as good as the slot they came from, bit for bit",
    n_steps=(340, 800),
)
def as_good_as_the_slot(trial: Trial) -> None:
    """Reused tokens, what is written next, and its log probabilities: greedy and sampled."""
    n, n_compared = trial.number(10, 24), 0
    with trial.engine() as live:
        text = tokens_of(live, TEXTS[0])
        for asked in (GREEDY, SAMPLED):

            def run(way: str, asked: Json = asked) -> list[Later]:
                return there_and_back(live, way, text, asked, n)

            control = trial.control(lambda run=run: run("stay"))  # type: ignore[misc]
            for way in WAYS[1:]:
                trial.now(f"by {way}")
                found = run(way)
                expect(f"what goes on after a {way}", found, control)
                n_compared += sum(len(each.tokens) for each in found)
    trial.measure("tokens compared", n_compared)


@scenario("a page goes into any slot of any geometry, and leaves the store", n_steps=(100, 100))
def any_slot(trial: Trial) -> None:
    """Its listing and the metrics tell its bytes while it is there, and nothing afterwards."""
    with trial.engine() as live:
        control = trial.control(lambda: undisturbed(live, 1, TEXTS[0]))
        said = hold(live, 1, TEXTS[0])
        held = live.held(1)
        out = live.page(1, "page_out", NAME).receipt
        expect("tokens of the page", out["n_tokens"], held)
        expect("tokens that its slot still holds", live.held(1), 0)
        (page,) = live.pages()
        told = {name: page[name] for name in ("name", "n_tokens", "n_bytes", "parked", "running")}
        whole = {"name": NAME, "n_tokens": held, "n_bytes": out["n_bytes"]}
        expect("the listing", told, whole | {"parked": False, "running": False})
        expect("bytes in the metrics", live.metric("page_store_bytes"), out["n_bytes"])
        hold(live, 1, TEXTS[1], n_predict=4)
        trial.now("another geometry")
        live.applied(n_ctx=3 * N_CTX, n_seq=4)
        back = live.page(3, "page_in", NAME).receipt
        expect("tokens of the page", back["n_tokens"], held)
        expect("tokens that can be reused", back["n_reusable"], control.n_reused)
        expect("pages that are left", live.pages(), [])
        expect("bytes in the metrics", live.metric("page_store_bytes"), 0)
        expect("what goes on with the conversation", go_on(live, 3, said), control)
        again = live.page(0, "page_in", NAME)
        expect("another page-in", (again.status, again.error["reason"]), (404, "unknown_page"))

        trial.now("a unified cache")  # it rounds differently, so the words are compared
        live.page(3, "page_out", NAME)
        live.erase()
        live.applied(n_ctx=3 * N_CTX, n_seq=4, kv_unified=True)
        live.page(2, "page_in", NAME)
        expect("what goes on", go_on(live, 2, said).tokens, control.tokens)
        trial.measure("page", out["n_bytes"] / 2**20, "MiB")
        trial.measure("out", out["ms"], "ms")
        trial.measure("in", back["ms"], "ms")


@scenario("a file holds a conversation across a change of the slot count", n_steps=(100, 100))
def file_and_slot_count(trial: Trial) -> None:
    """Without the patches the engine answers `n_stream mismatch`, and it is lost."""
    with trial.engine() as live:
        control = trial.control(lambda: undisturbed(live, 0, TEXTS[0]))
        said = hold(live, 0, TEXTS[0])
        saved = live.file(0, "save", NAME).receipt
        live.erase()
        live.applied(n_ctx=4 * N_CTX, n_seq=4)
        restored = live.file(3, "restore", NAME).receipt
        expect("tokens that are restored", restored["n_restored"], saved["n_saved"])
        expect("what goes on with the conversation", go_on(live, 3, said), control)
        trial.measure("tokens restored", restored["n_restored"])


@scenario("a page that is spilled to files is read back whole", n_steps=(60, 60))
def spilled(trial: Trial) -> None:
    """The page may leave the memory once its files are there."""
    with trial.engine() as live:
        control = trial.control(lambda: undisturbed(live, 1, TEXTS[0]))
        said = hold(live, 1, TEXTS[0])
        out = live.page(1, "page_out", NAME).receipt
        spill = live.spill(NAME, drop=True).receipt
        expect("tokens that are spilled", spill["n_tokens"], out["n_tokens"])
        expect("pages that are left", live.pages(), [])
        restored = live.file(0, "restore", NAME).receipt
        expect("tokens that are restored", restored["n_restored"], out["n_tokens"])
        expect("what goes on with the conversation", go_on(live, 0, said), control)
        trial.measure("tokens restored", restored["n_restored"])


@scenario("a parked conversation is a page too", n_steps=(40, 40))
def parked(trial: Trial) -> None:
    """It can be taken into a slot that serves, or dropped."""
    with trial.engine() as live:
        hold(live, 1, TEXTS[0], n_predict=4)
        held = live.held(1)
        live.applied(n_seq=1)
        (page,) = live.pages()
        back = live.page(0, "page_in", page["name"]).receipt
        expect("tokens that came back", back["n_tokens"], held)
        expect("what is left", (live.pages(), live.props()["parked"]), ([], []))
        live.applied(n_seq=2)
        hold(live, 1, TEXTS[0], n_predict=4)
        live.applied(n_seq=1)
        (page,) = live.pages()
        expect("the status of a drop", live.page(0, "page_drop", page["name"]).status, 200)
        expect("what is left", (live.pages(), live.props()["parked"]), ([], []))
        trial.measure("tokens that came back", held)


@scenario("a request that is parked is neither taken nor dropped", n_steps=(90, 90))
def parked_request(trial: Trial) -> None:
    """It goes on when there is a slot for it."""
    with trial.engine() as live, streams(live) as running:
        body = GREEDY | {"n_probs": 0, "n_predict": 80, "prompt": TEXTS[0], "id_slot": 1}
        stream = running.start(**body)
        stream.reach(4)
        live.applied(n_seq=1)
        (page,) = live.pages()
        for action in ("page_in", "page_drop"):
            answer = live.page(0, action, page["name"])
            found = (answer.status, answer.error["reason"])
            expect(f"what {action} is answered", found, (409, "request_waiting"))
        live.applied(n_seq=2)
        n_written = stream.result()["tokens_predicted"]
        expect("tokens that it wrote", n_written, 80)
        trial.measure("tokens written", n_written)
