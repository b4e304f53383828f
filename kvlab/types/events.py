"""What the engine tells its listeners. The recorder is one; a live plot or a test may be others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from kvlab.types.plan import Outcome, Plan


class BlockEvent(NamedTuple):
    """One change of a physical block. `kind`: allocate, publish, hit, share, unshare, release, free, evict, swap_out, swap_in, copy, drop.

    `content`: the block's key in hex (published blocks, else ""); `request_id`: who caused it ("" for eviction). `parent`: of a published
    block, the key of the one before it ("": first of a prompt). Every change of a reference count is an event: allocate, hit and share
    raise it, unshare (others still hold the block), release (it stays cached) and free lower it.
    """

    step: int
    kind: str
    tier: str
    block_id: int
    ref_count: int
    content: str
    request_id: str
    parent: str = ""


class StepStats(NamedTuple):
    """State after a step's commit, and what the step counted (in this step alone). Units: blocks, tokens, milliseconds as named.

    The recorder turns this into one row; `kvlab.trace.schema` holds the meaning of each column. `now_s` is the plan's time, `end_s` the
    engine's clock after the commit: with the outcome it is all that a recorded runner needs to give a replay the same clock.
    """

    step: int
    now_s: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_swapped_reqs: int
    num_running_seqs: int
    num_ctx_tokens: int
    num_generation_tokens: int
    num_prompt_tokens_computed: int
    num_output_tokens: int
    num_scheduled_seqs: int
    num_decode_seqs: int
    num_kv_tokens_read: int
    num_attention_pairs: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_evictable: int
    kv_blocks_free: int
    kv_blocks_reserved: int
    external_fragmentation_blocks: int
    cpu_blocks_total: int
    cpu_blocks_used: int
    internal_fragmentation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preempted_queries: int
    preempted_hits: int
    num_preemptions: int
    num_evicted_blocks: int
    swapped_in_blocks: int
    swapped_out_blocks: int
    cow_copies: int
    relocated_blocks: int
    recomputed_tokens: int
    admission_blocked_by: str
    watermark_blocks: int
    shared_blocks_saved: int
    schedule_ms: float
    execute_ms: float
    commit_ms: float
    end_s: float


class RequestRecord(NamedTuple):
    """One finished (or refused, or aborted) request. Times in seconds of the engine's clock.

    `token_times_s[i]`: when output token i of the first sequence was accepted. `spans`: (state, start_s, end_s) for a timeline,
    states queue, prefill, decode, preempted, swapped. `outputs`: token ids and finish reason of each returned sequence.
    `texts`: their texts in the same order, where the engine has a tokenizer. `num_output_tokens` counts all sequences.
    `cache_until`: the position (tokens) from which its blocks were kept out of the prefix cache; None: none were.
    """

    request_id: str
    arrival_s: float
    first_scheduled_s: float | None
    finish_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_wasted_tokens: int
    num_shareable_tokens_lost: int
    num_preemptions: int
    num_swaps: int
    finish_reason: str
    token_times_s: tuple[float, ...]
    spans: tuple[tuple[str, float, float], ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    tenant: str
    session_id: str | None
    turn: int
    priority: int
    detail: str = ""
    texts: tuple[str, ...] = ()
    cache_until: int | None = None


class Listener(Protocol):
    """Hears the engine. Must not change anything; called in the engine's thread, so it should be quick."""

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        """After each commit."""

    def on_request(self, record: RequestRecord) -> None:
        """When a request has ended, for whatever reason."""

    def on_block(self, event: BlockEvent) -> None:
        """Per block event; only called when `wants_block_events` is True."""

    @property
    def wants_block_events(self) -> bool:
        """Block events cost time: they are made only when some listener wants them."""
