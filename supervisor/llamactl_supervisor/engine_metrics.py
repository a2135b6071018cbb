"""The metrics that llama-server answers for itself, as they are in our scrape.

The list is for the documentation; a test holds it against the engine.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "llamacpp:"


class Described(NamedTuple):
    """One metric of the engine; `name` without the prefix, `type` as Prometheus has it."""

    name: str
    type: str
    help: str


WITH_DRAFT = "spec_decode_num_accepted_tokens_per_pos_total"
"""Has a label `position`, and is there once drafts have been verified."""
MAXIMUM = "n_tokens_max"
"""The engine calls it a counter. It is a maximum: it is not added up over engines, so a gauge."""

ENGINE_METRICS = (
    Described(
        "prompt_tokens_total",
        "counter",
        "Number of prompt tokens processed, excluding cached tokens",
    ),
    Described(
        "prompt_tokens_cached_total",
        "counter",
        "Number of prompt tokens reused from the cache",
    ),
    Described("prompt_seconds_total", "counter", "Total time spent processing prompts"),
    Described("tokens_predicted_total", "counter", "Number of generation tokens processed"),
    Described("tokens_predicted_seconds_total", "counter", "Total time spent generating tokens"),
    Described(
        "n_decode_total",
        "counter",
        "Total number of llama_decode() calls, "
        "excluding speculative decoding and multimodal decoding",
    ),
    Described("n_tokens_max", "gauge", "Largest observed sequence length (prompt + generation)"),
    Described(
        "spec_decode_num_draft_tokens_total",
        "counter",
        "Speculative: Total draft tokens generated",
    ),
    Described(
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "Speculative: Total draft tokens accepted by the target model",
    ),
    Described(
        "spec_decode_num_drafts_total",
        "counter",
        "Speculative: Total speculative decoding verification steps",
    ),
    Described("prompt_tokens_seconds", "gauge", "Average prompt throughput in tokens/s"),
    Described("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s"),
    Described("requests_processing", "gauge", "Number of requests processing"),
    Described("requests_deferred", "gauge", "Number of requests deferred"),
    Described(
        "n_busy_slots_per_decode",
        "gauge",
        "Average number of busy slots per llama_decode() call",
    ),
    Described(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Accepted tokens per draft position",
    ),
    Described("weight_loads_total", "counter", "Times that the weights were loaded"),
    Described("reconfigure_total", "counter", "Changes of the geometry that were applied"),
    Described("reconfigure_refused_total", "counter", "Changes that could not be taken"),
    Described(
        "reconfigure_failed_total",
        "counter",
        "Changes that failed on the way, the old geometry went on",
    ),
    Described("reconfigure_dropped_total", "counter", "States that a forced change dropped"),
    Described(
        "parked_states",
        "gauge",
        "States that the geometry has no place for, kept in host memory",
    ),
    Described("kv_cells_used", "gauge", "Tokens that the slots hold"),
    Described("kv_cells_total", "gauge", "Cells of the context"),
    Described("quiet", "gauge", "Whether requests wait until POST /quiesce lets them start"),
    Described(
        "page_store_bytes",
        "gauge",
        "Bytes of host memory that pages take, parked states included",
    ),
    Described("page_store_pages", "gauge", "Pages in host memory, parked states included"),
    Described("page_out_total", "counter", "Conversations that left their slot for a page"),
    Described("page_in_total", "counter", "Pages that went into a slot"),
    Described("page_spill_total", "counter", "Pages that were written to files"),
    Described("page_failed_total", "counter", "Page actions that failed or found no room"),
    Described(
        "ctx_checkpoint_bytes",
        "gauge",
        "Bytes of host memory that the slots' context checkpoints take",
    ),
    Described(
        "ctx_checkpoints_evicted_budget_total",
        "counter",
        "Context checkpoints that were given up for the budget",
    ),
    Described(
        "ctx_checkpoints_skipped_budget_total",
        "counter",
        "Context checkpoints that were not made for the budget",
    ),
    Described(
        "reconfigure_pause_seconds",
        "histogram",
        "Time in which no token could be decoded, of each change",
    ),
)
