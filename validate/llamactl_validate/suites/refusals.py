"""What cannot be is refused by name, with numbers, and touches nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl_validate.conversations import TEXTS, hold, tokens_of
from llamactl_validate.expecting import Skipped, expect, expect_that, until
from llamactl_validate.scenario import Trial, scenario
from llamactl_validate.streams import streams

if TYPE_CHECKING:
    from llamactl_validate.asked import Answer

NONSENSE = (
    ('{"n_ctx": 0}', "n_ctx has to be between 1 and"),
    ('{"n_ctx": -1}', "n_ctx has to be between 1 and"),
    ('{"n_ctx": 1000000000000}', "n_ctx has to be between 1 and"),
    ('{"n_ctx": 2147483647}', "n_ctx has to be between 1 and"),
    ('{"n_ctx": "big"}', "'n_ctx' has to be an integer, got \"big\""),
    ('{"n_ctx": 1e3}', "'n_ctx' has to be an integer, got 1000.0"),
    ('{"n_ctx": 1e400}', "JSON object"),
    ('{"n_ctx": null}', "'n_ctx' has to be an integer, got null"),
    ('{"n_seq": 0}', "n_seq has to be between 1 and 256"),
    ('{"n_seq": 257}', "n_seq has to be between 1 and 256"),
    ('{"n_seq": -1}', "n_seq has to be between 1 and 256"),
    ('{"n_seq": true}', "'n_seq' has to be an integer, got true"),
    ('{"kv_unified": 1}', "'kv_unified' has to be true or false, got 1"),
    ('{"dry_run": "yes"}', "'dry_run' has to be true or false"),
    ('{"cache_type_k": 8}', "'cache_type_k' has to be a string, got 8"),
    ('{"cache_type_k": "q9_9", "force": true}', "cache_type_k has to be one of f32, f16,"),
    ('{"cache_type_k": "", "force": true}', "cache_type_k has to be one of f32, f16,"),
    ('{"cache_type_k": "F16", "force": true}', "cache_type_k has to be one of f32, f16,"),
    ('{"n_ctx": 8192, "slots": 4}', "unknown field 'slots'"),
    ("[]", "JSON object"),
    ('"n_ctx"', "JSON object"),
    ("", "JSON object"),
    ('{"n_ctx": 8192', "JSON object"),
    ("\xff", "JSON object"),
)
"""Bodies of a change that makes no sense, and what has to be said of each."""
NO_PAGE_NAMES = (
    *("", "../x", "/etc/passwd", "a/b", "x.ckpt", "x.lora", "x.dft", ".x", "-x", "a" * 300),
    *("a\x00b", "a b", "ä", "parked-1", "..", "x\n"),
)
NO_SLOTS = ("-1", "x", "99999999999", "1x", "+1", "%201")
FAR_TOO_MANY = 2_000_000_000


def refused(answer: Answer, status: int, reason: str) -> dict[str, object]:
    """Return the error of a refusal for this reason."""
    expect_that("it is refused", answer.status != 200, answer.body)
    error = answer.error
    expect("the refusal", (answer.status, error["reason"]), (status, reason))
    return error


@scenario(
    "a change that makes no sense is told why, and touches nothing", n_steps=(1, 1), slot_tokens=1
)
def nonsense(trial: Trial) -> None:
    """Numbers out of range, other types, unknown fields, and what is no JSON object."""
    with trial.engine() as live:
        before = live.props()
        for body, said in NONSENSE:
            trial.now(f"the body {body}")
            error = refused(live.reconfigure_raw(body), 400, "invalid_geometry")
            expect("the type of the error", error["type"], "reconfigure_refused")
            expect_that(f"it says {said!r}", said in str(error["message"]), error["message"])
            expect("/props afterwards", live.props(), before)
    trial.measure("bodies", len(NONSENSE))


@scenario("what the memory cannot hold is refused with both numbers", n_steps=(10, 10))
def memory(trial: Trial) -> None:
    """Before anything is allocated; the conversation in the slot is untouched."""
    with trial.engine() as live:
        hold(live, 0, TEXTS[0], n_predict=4)
        before = live.props()
        if live.reconfigure(n_ctx=FAR_TOO_MANY, dry_run=True).status == 200:
            raise Skipped("this model's memory does not grow with its context")
        answer = live.reconfigure(n_ctx=FAR_TOO_MANY)
        refused(answer, 409, "insufficient_memory")
        numbers = answer.error["details"]
        needed, there = numbers["bytes_needed"], numbers["bytes_available"]
        expect_that("more is needed than there is", needed > there > 0, numbers)
        expect("/props afterwards", live.props(), before)
        again = live.ask("/completion", prompt=TEXTS[0], n_predict=1, id_slot=0).receipt
        expect_that("the conversation is still there", again["timings"]["cache_n"] > 0)
        trial.measure("needed", needed / 2**30, "GiB")
        trial.measure("available", there / 2**30, "GiB")


@scenario("another type of the cache is refused unless it is forced", n_steps=(10, 10))
def cache_type(trial: Trial) -> None:
    """By force it drops the conversations, which a dry run says before."""
    with trial.engine() as live:
        hold(live, 0, TEXTS[0], n_predict=4)
        before = live.props()
        held = live.held(0)
        error = refused(live.reconfigure(cache_type_k="q8_0"), 409, "cache_type_change")
        expect_that("it names `force`", "force" in str(error["message"]), error["message"])
        expect("/props afterwards", live.props(), before)
        planned = live.reconfigure(cache_type_k="q8_0", force=True, dry_run=True).receipt
        dropped = [{"slot": 0, "tokens": held, "fate": "dropped"}]
        expect("what would become of the slots", planned["slots"], dropped)
        expect("/props afterwards", live.props(), before)
        trial.measure("tokens kept", held)


@scenario("a request for more choices than there are slots is refused by name", n_steps=(60, 60))
def choices(trial: Trial) -> None:
    """And slots that such a request waits for are not taken away."""
    body = {"prompt": TEXTS[1], "temperature": 0, "ignore_eos": True, "n": 4, "n_predict": 4}
    with trial.engine() as live, streams(live) as running:
        answer = live.ask("/v1/completions", **body)
        expect("the status", answer.status, 400)
        said = "n_cmpl = 4 is above the number of slots (2)"
        expect_that(f"it says {said!r}", said in answer.error["message"], answer.error)
        live.applied(n_ctx=8192, n_seq=4)
        busy = running.start(**body | {"n": 1, "n_predict": 60}, id_slot=0)
        busy.reach(2)
        waiting = running.submit(lambda: live.ask("/v1/completions", **body))
        until(
            "the choices wait for their slots",
            lambda: live.metric("requests_deferred") == 1,
            within_s=live.patience_s,
        )
        trial.now("slots less than the choices need")
        error = refused(live.reconfigure(n_seq=2), 409, "fan_out_in_progress")
        expect("its numbers", error["details"], {"n_seq_needed": 4, "n_seq": 2})
        busy.result()
        chosen = waiting.result(live.patience_s).receipt["choices"]
        expect("choices that are answered", len(chosen), 4)
        trial.measure("choices answered", len(chosen))


@scenario("names and slots that are none are refused by every page verb", n_steps=(10, 10))
def page_names(trial: Trial) -> None:
    """Paths out of the directory among them; the slot keeps what it holds."""
    with trial.engine() as live:
        hold(live, 0, TEXTS[0], n_predict=1)
        held = live.held(0)
        for name in NO_PAGE_NAMES:
            trial.now(f"the name {name!r}")
            refused(live.page(0, "page_out", name), 400, "bad_name")
            for action in ("page_in", "page_drop"):
                answer = live.page(0, action, name)
                expect_that(f"{action} is refused", answer.status in (400, 404), answer.body)
        slots = (*NO_SLOTS, str(live.geometry()["n_seq"]))
        for slot in slots:
            trial.now(f"the slot {slot!r}")
            for action in ("page_out", "page_in"):
                refused(live.page(slot, action, "fox"), 400, "bad_slot")
        expect("tokens in the slot", live.held(0), held)
        expect("pages", live.pages(), [])
        trial.measure("names", len(NO_PAGE_NAMES))
        trial.measure("slots", len(slots))


@scenario("a page that is too large for its slot is told both numbers", n_steps=(10, 10))
def page_too_large(trial: Trial) -> None:
    """The slot keeps what it holds, and the page stays."""
    with trial.engine() as live:
        text = tokens_of(live, TEXTS[0])
        live.ask("/completion", prompt=(text * 400)[:400], n_predict=1, id_slot=0)
        held = live.page(0, "page_out", "long").receipt["n_tokens"]
        hold(live, 0, TEXTS[0], n_predict=1)
        kept = live.held(0)
        live.applied(n_ctx=512)
        fit = live.slots()[0]["n_ctx"]
        error = refused(live.page(0, "page_in", "long"), 409, "too_large")
        expect("its numbers", error["details"], {"tokens_held": held, "tokens_fit": fit})
        expect("tokens in the slot", live.held(0), kept)
        expect("tokens in pages", [page["n_tokens"] for page in live.pages()], [held])
        trial.measure("tokens too many", held - fit)
