"""Conversations on the tiny llama that tests of page files hold, and how each of them goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from live_engine import Answer, LiveEngine

OPTIONS = (
    *("--override-kv", "llama.context_length=int:65536", "--cache-ram", "0", "--metrics"),
    *("--ctx-size", "16384"),
)
ASK = {"temperature": 0, "n_predict": 8, "ignore_eos": True, "n_probs": 1}
MORE = [21, 22]
"""What is said to go on."""

Written = tuple[int, list[tuple[int, float]]]
"""How many tokens were reused, and each token that was written with its logprob."""


@dataclass(frozen=True)
class Conversation:
    """One that was held."""

    said: list[int]
    control: Written
    """How it goes on in a slot that no file has ever touched."""


def _ask(live: LiveEngine, slot: int, prompt: list[int]) -> Written:
    answer = live.ask("/completion", **ASK, prompt=prompt, id_slot=slot).receipt
    written = answer["completion_probabilities"]
    return answer["timings"]["cache_n"], [(each["id"], each["logprob"]) for each in written]


def hold(live: LiveEngine, slot: int, k: int, n_tokens: int) -> list[int]:
    """Have a slot hold one of some conversations, from the first token; return its tokens."""
    live.erase(slot)
    prompt = [20 + (i * (k + 3) + k) % 100 for i in range(n_tokens)]
    return [*prompt, *(token for token, _ in _ask(live, slot, prompt)[1])]


def go_on(live: LiveEngine, slot: int, said: list[int]) -> Written:
    """Go on with a conversation, in an engine that does nothing else."""
    return _ask(live, slot, [*said, *MORE])


def converse(live: LiveEngine, slot: int, k: int, n_tokens: int) -> Conversation:
    """Have a slot hold a conversation of which it is known how it goes on."""
    said = hold(live, slot, k, n_tokens)
    control = go_on(live, slot, said)
    assert hold(live, slot, k, n_tokens) == said
    return Conversation(said, control)


def refused(answer: Answer, status: int, reason: str) -> Any:
    """Return the error of a refusal for this reason."""
    assert answer.status == status, answer.body
    error = answer.error
    assert (error["type"], error["reason"]) == ("page_refused", reason), error
    return error


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file below a directory but the lock."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".page-lock"
    }
