"""What is told to a model, and how a conversation that it holds is gone on with or edited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llamactl_validate.asked import Asked, Json

TEXTS = (
    "The lighthouse keeper walked down to the shore and looked at the sea, which was grey and "
    "quiet that morning. He had lived beside it for thirty years, and each day he wrote into a "
    "book which ships had passed, and from where the wind had come. His daughter",
    "Water begins to boil when the pressure of its vapour is as high as the pressure of the air "
    "above it. On a mountain the air is thin, so that water boils sooner there, at less heat, and "
    "an egg has to stay in it longer. This is also the reason why",
    "To bake a loaf of bread you need flour, water, salt and time. Mix them, knead the dough until "
    "it is smooth, and let it rest in a warm place until it is twice as big as it was before. The "
    "oven has to be very hot. After half an hour",
    "The train to the north leaves at seven in the evening from the second platform. It stops at "
    "every town along the river, crosses the hills at night, and comes to the coast early in the "
    "morning, when the fishing boats return. In the last carriage",
)
MORE = " And then"
"""What is said to go on."""
GREEDY: Json = {"temperature": 0, "ignore_eos": True, "n_predict": 48, "n_probs": 1}
"""Log probabilities are in the answer, so that every bit of the logits counts."""
SAMPLED: Json = GREEDY | {"temperature": 0.8, "seed": 7}
NUMBERS: Json = {
    "type": "array",
    "minItems": 10,
    "maxItems": 10,
    "items": {"type": "integer", "minimum": 100, "maximum": 999},
}
"""A schema, and so a grammar."""
N_LATER = 8
"""Tokens of a later answer."""


@dataclass(frozen=True)
class Later:
    """What came of a request that goes on with a conversation, or edits it."""

    n_reused: int
    """Tokens that it found in its slot."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    draft_counts: tuple[int, int]
    """How many tokens were drafted, and accepted."""


def tokens_of(live: Asked, text: str) -> list[int]:
    """Return a text as the model's tokens."""
    tokens: list[int] = live.ask("/tokenize", content=text).receipt["tokens"]
    return tokens


def ask(live: Asked, slot: int, prompt: Sequence[int], asked: Json, n_predict: int) -> Later:
    """Have a slot answer."""
    body = asked | {"prompt": prompt, "n_predict": n_predict, "id_slot": slot}
    answer = live.ask("/completion", **body, return_tokens=True).receipt
    probabilities, timings = answer.get("completion_probabilities", ()), answer["timings"]
    return Later(
        n_reused=timings["cache_n"],
        draft_counts=(timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)),
        tokens=tuple(answer["tokens"]),
        logprobs=tuple(token["logprob"] for token in probabilities),
    )


def hold(live: Asked, slot: int, text: str, n_predict: int = 16) -> list[int]:
    """Have a slot hold a conversation; return its tokens, those that the model wrote included."""
    prompt = tokens_of(live, text)
    return [*prompt, *ask(live, slot, prompt, GREEDY, n_predict).tokens]


def go_on(live: Asked, slot: int, said: Sequence[int]) -> Later:
    """Go on with what a slot holds."""
    return ask(live, slot, [*said, *tokens_of(live, MORE)], GREEDY, N_LATER)


def undisturbed(live: Asked, slot: int, text: str) -> Later:
    """Return how a conversation goes on that nobody has touched; the slots are empty afterwards."""
    said = hold(live, slot, text)
    found = go_on(live, slot, said)
    live.erase()
    return found
