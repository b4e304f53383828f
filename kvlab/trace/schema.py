"""Every column kvlab records: name, dtype, unit and meaning, in one place. Frames, files, docs and tests come from these tables.

Counts in a step's row belong to that step alone; states (running, waiting, blocks, bytes) are those after its commit. Units of
time stand in a column's name. A measured quantity never stands in another's column and is null where it was not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

RAW, MEASURED, DERIVED = "engine", "recorder", "derived"


class Column(NamedTuple):
    """One column. `dtype`: int64, int64? (nullable), float64 (NaN: not defined), str (null: none), or list<...> of these.

    `source`: "engine" (as the engine told it), "recorder" (measured by the recorder), "derived" (computed when a frame is built).
    """

    name: str
    dtype: str
    unit: str
    meaning: str
    source: str = RAW


def _rows(text: str, source: str) -> tuple[Column, ...]:
    """Columns from lines of `name | dtype | unit | meaning`."""
    fields = ([part.strip() for part in line.split("|", 3)] for line in text.strip().splitlines())
    return tuple(Column(name, dtype, unit, meaning, source) for name, dtype, unit, meaning in fields)


STEPS_RAW = _rows(
    """
    step | int64 | - | 0-based number of the step
    now_s | float64 | s | engine's clock when the step's decisions were made (the plan's time)
    num_running_reqs | int64 | requests | in the running queue
    num_waiting_reqs | int64 | requests | arrived and not running, preempted by recompute included
    num_swapped_reqs | int64 | requests | swapped out to the cpu tier
    num_running_seqs | int64 | sequences | sequences of the running requests (n > 1 and beams count each)
    num_ctx_tokens | int64 | tokens | context of the running sequences: tokens whose KV is in the pool
    num_generation_tokens | int64 | tokens | computed past the prompt (decode) in this step, recomputed ones included
    num_prompt_tokens_computed | int64 | tokens | prompt tokens computed in this step, recomputed ones included, cached ones not
    num_output_tokens | int64 | tokens | accepted as output in this step, all sequences (all beams, those dropped later too)
    num_scheduled_seqs | int64 | sequences | computed in this step
    num_decode_seqs | int64 | sequences | of these, with a single new token (a last chunk of one token is one too)
    num_kv_tokens_read | int64 | tokens | K and V entries that attention reads: each sequence's context and new tokens, or sinks and window
    num_attention_pairs | int64 | pairs | query-key pairs: each new token sees the context up to itself, or its sinks and window
    kv_blocks_total | int64 | blocks | gpu tier: blocks in the pool = used + evictable + free
    kv_blocks_used | int64 | blocks | gpu tier: held by some block table (reference count > 0)
    kv_blocks_evictable | int64 | blocks | gpu tier: cached content that no table holds; may be reused or evicted
    kv_blocks_free | int64 | blocks | gpu tier: nothing in them
    kv_blocks_reserved | int64 | blocks | gpu tier: of the used ones, those without a token: a layout has set them aside for tokens to come
    external_fragmentation_blocks | int64 | blocks | gpu tier: free blocks beyond the largest region that the layout could place in them
    cpu_blocks_total | int64 | blocks | cpu tier (swap space): blocks in the pool
    cpu_blocks_used | int64 | blocks | cpu tier: held by swapped requests
    internal_fragmentation_tokens | int64 | tokens | slots in used blocks that hold no token
    prefix_cache_queries | int64 | tokens | prompt tokens of requests admitted for the first time in this step
    prefix_cache_hits | int64 | tokens | of these, taken from the prefix cache
    preempted_queries | int64 | tokens | tokens of preempted requests that came back in this step (not in prefix_cache_queries)
    preempted_hits | int64 | tokens | of these, still found in the cache or brought back from swap
    num_preemptions | int64 | requests | gave way in this step
    num_evicted_blocks | int64 | blocks | cached blocks evicted in this step
    swapped_in_blocks | int64 | blocks | moved cpu to gpu in this step
    swapped_out_blocks | int64 | blocks | moved gpu to cpu in this step
    cow_copies | int64 | blocks | copied before a write because they were shared or published (with partial_block_copy: or found in part)
    relocated_blocks | int64 | blocks | copied because a sequence had outgrown its region (a layout with regions)
    recomputed_tokens | int64 | tokens | computed in this step though they had been computed before a preemption
    admission_blocked_by | str | - | why the first in line is out: watermark, blocks, fragmentation (no region), tokens ...; "" if nobody
    watermark_blocks | int64 | blocks | kept free by admission for running sequences
    shared_blocks_saved | int64 | blocks | references beyond the first to used blocks: what sharing saves now
    schedule_ms | float64 | ms | host time of schedule()
    execute_ms | float64 | ms | the runner's time: wall time; in a simulated run the cost model's, in a replay the recorded one
    commit_ms | float64 | ms | host time of commit()
    end_s | float64 | s | engine's clock when the runner was done: the time of the step's tokens (before the commit)
    """,
    RAW,
)

STEPS_MEASURED = _rows(
    """
    record_ms | float64 | ms | host time of recording this step and the requests since the last (block events apart)
    process_rss_bytes | int64? | bytes | resident memory of the whole process, measured
    kv_bytes_allocated | int64? | bytes | size of the gpu tier's KV tensors, from the tensors themselves; 0 where there are none
    device_memory_allocated_bytes | int64? | bytes | held by tensors on the accelerator, sampled; null without one
    device_memory_reserved_bytes | int64? | bytes | reserved by torch's allocator on the accelerator, sampled; null without one
    """,
    MEASURED,
)

STEPS_DERIVED = _rows(
    """
    step_ms | float64 | ms | from now_s (or the last end_s, if later) to end_s: without commit_ms and record_ms
    output_tokens_per_s | float64 | tokens/s | num_output_tokens / step_ms * 1000; NaN for a step without length
    prompt_tokens_per_s | float64 | tokens/s | num_prompt_tokens_computed / step_ms * 1000; NaN for a step without length
    kv_cache_usage | float64 | fraction | kv_blocks_used / kv_blocks_total (evictable blocks are not used); 0 without a pool
    """,
    DERIVED,
)

REQUESTS_RAW = _rows(
    """
    request_id | str | - | the caller's id
    arrival_s | float64 | s | when the engine could first see it
    first_scheduled_s | float64 | s | when it was first scheduled; NaN if never
    finish_s | float64 | s | when it ended
    num_prompt_tokens | int64 | tokens | length of the prompt
    num_output_tokens | int64 | tokens | output tokens of all its sequences
    num_cached_tokens | int64 | tokens | prompt tokens taken from the prefix cache at its first admission
    num_computed_tokens | int64 | tokens | tokens computed for it, recomputed ones included
    num_wasted_tokens | int64 | tokens | computed again because a preemption had thrown them away
    num_shareable_tokens_lost | int64 | tokens | cached tokens it shared but could not use because only full blocks are shared
    num_preemptions | int64 | - | times it gave way
    num_swaps | int64 | - | of these, by swap
    finish_reason | str | - | stop, length, abort, refused, kv_capacity
    token_times_s | list<float64> | s | when each output token of the first sequence was accepted
    span_states | list<str> | - | its life as spans: queue, prefill, decode, preempted, swapped
    span_starts_s | list<float64> | s | start of each span
    span_ends_s | list<float64> | s | end of each span
    output_token_ids | list<list<int64>> | - | token ids of each returned sequence
    output_finish_reasons | list<str> | - | finish reason of each returned sequence
    output_texts | list<str> | - | text of each returned sequence, where there is a tokenizer
    tenant | str | - | who pays, for fair policies
    session_id | str | - | conversation it belongs to; null if none
    turn | int64 | - | 0-based turn in the conversation
    priority | int64 | - | lower goes first
    detail | str | - | more on the finish reason, e.g. why it was refused
    cache_until | int64? | tokens | position from which its tokens were kept out of the prefix cache; null: none were
    """,
    RAW,
)

REQUESTS_DERIVED = _rows(
    """
    queue_time_s | float64 | s | first_scheduled_s - arrival_s
    ttft_s | float64 | s | time to first token: first token - arrival_s; NaN without one
    tpot_s | float64 | s | time per output token after the first: (last - first token) / (tokens - 1); NaN with fewer than two
    itl_mean_s | float64 | s | mean gap between successive tokens of the first sequence
    itl_p99_s | float64 | s | 99th percentile of these gaps (linear interpolation)
    itl_max_s | float64 | s | longest of these gaps
    e2el_s | float64 | s | end-to-end latency: finish_s - arrival_s
    """,
    DERIVED,
)

BLOCKS = _rows(
    """
    step | int64 | - | step in which it happened
    kind | str | - | allocate, publish, hit, share, unshare, release, free, evict, swap_out, swap_in, copy, drop
    tier | str | - | gpu or cpu
    block_id | int64 | - | index in its tier
    ref_count | int64 | - | block tables that hold it afterwards
    content | str | - | key of its content in hex (published blocks), else ""
    request_id | str | - | who caused it; "" for eviction
    parent | str | - | publish: key of the block before it, in hex; "" for the first of a prompt, and for other kinds
    """,
    RAW,
)

OUTCOMES = _rows(
    """
    step | int64 | - | 0-based number of the step
    now_s | float64 | s | engine's clock when its decisions were made
    end_s | float64 | s | engine's clock after its commit
    execute_s | float64 | s | the runner's time
    seq_ids | list<int64> | - | the scheduled sequences, in the plan's order
    num_new_tokens | list<int64> | tokens | computed for each of them
    tokens | list<list<int64>> | - | tokens accepted by each of them
    forks | str | - | JSON, seq_id: first tokens of its further samples
    candidates | str | - | JSON, seq_id: (token_id, logprob) continuations offered to beam search
    logprobs | str | - | JSON, seq_id: (logprob, top_ids, top_logprobs) of each accepted token, then of each fork
    """,
    RAW,
)

PLANS = _rows(
    """
    step | int64 | - | 0-based number of the step
    decisions | str | - | JSON of Plan.decisions()
    """,
    RAW,
)

STEPS = (*STEPS_RAW, *STEPS_MEASURED, *STEPS_DERIVED)
REQUESTS = (*REQUESTS_RAW, *REQUESTS_DERIVED)
TABLES: dict[str, tuple[Column, ...]] = {
    "steps": STEPS, "requests": REQUESTS, "blocks": BLOCKS, "outcomes": OUTCOMES, "plans": PLANS,
}  # fmt: skip
"""The tables of a run folder, by the stem of their file."""


def recorded(table: str) -> tuple[Column, ...]:
    """The columns of a table that are kept while a run goes: all but the derived ones."""
    return tuple(c for c in TABLES[table] if c.source != DERIVED)


def markdown_table(columns: Sequence[Column]) -> str:
    """The columns as a Markdown table, for the docs."""
    lines = ["| column | dtype | unit | from | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{c.name}` | `{c.dtype}` | {c.unit} | {c.source} | {c.meaning} |" for c in columns]
    return "\n".join(lines) + "\n"
