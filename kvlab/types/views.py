"""Read-only views that policies are given. The engine's own objects satisfy these protocols; policies must not write to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Now(NamedTuple):
    """The step and the engine clock's time (s): the only clock a policy may use."""

    step: int
    now_s: float


class BlockView(Protocol):
    """A published block (full of computed tokens, findable by content).

    Ticks are a counter of cache events (insert, hit, release), not times: strictly increasing, so keys built from them never tie.
    """

    @property
    def block_id(self) -> int:
        """Physical index in its pool."""
    @property
    def content(self) -> bytes:
        """Key of its content: a chained hash of all tokens up to its end."""
    @property
    def parent(self) -> bytes | None:
        """Content of the block before it (None: the first of a prompt)."""
    @property
    def depth(self) -> int:
        """Index in its sequence: 0 is the first block."""
    @property
    def num_tokens(self) -> int:
        """Tokens it holds (the block size)."""
    @property
    def ref_count(self) -> int:
        """Live tables that hold it; it may be evicted at 0 only."""
    @property
    def num_hits(self) -> int:
        """Hits since it was inserted."""
    @property
    def inserted_tick(self) -> int:
        """Tick of its insert."""
    @property
    def counted_tick(self) -> int:
        """Tick of its last insert or hit: when it reached its present number of hits."""
    @property
    def used_tick(self) -> int:
        """Tick of its last insert, hit or release."""
    @property
    def inserted_s(self) -> float:
        """Clock (s) at its insert."""
    @property
    def used_s(self) -> float:
        """Clock (s) at its last insert, hit or release."""


class PoolView(Protocol):
    """Counts of one tier's pool, in blocks. free + evictable + used = total."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
    @property
    def num_free(self) -> int:
        """Blocks with nothing in them."""
    @property
    def num_evictable(self) -> int:
        """Published blocks that no table holds."""
    @property
    def num_used(self) -> int:
        """Blocks that some table holds."""
    @property
    def block_size(self) -> int:
        """Tokens per block."""


class GroupView(Protocol):
    """A request in the engine: one prompt and its n sequences.

    `num_computed_tokens` counts tokens whose KV is in the pool, `num_blocks` distinct blocks held now, both over all sequences.
    `oracle_output_len` is the future; only policies that say so, in their name or by `reads_oracle`, may read it.
    """

    @property
    def group_id(self) -> int:
        """Number of the request, in order of submission."""
    @property
    def request_id(self) -> str:
        """The caller's id."""
    @property
    def arrival_s(self) -> float:
        """Arrival (s)."""
    @property
    def priority(self) -> int:
        """Lower goes first."""
    @property
    def tenant(self) -> str:
        """Who pays."""
    @property
    def num_sequences(self) -> int:
        """Live sequences; before the first token, those it will have."""
    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length."""
    @property
    def num_output_tokens(self) -> int:
        """Longest output so far among its sequences."""
    @property
    def max_tokens(self) -> int:
        """Limit of output tokens per sequence."""
    @property
    def num_tokens(self) -> int:
        """Prompt and longest output."""
    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the pool."""
    @property
    def num_blocks(self) -> int:
        """Distinct blocks held in the gpu tier."""
    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens still to compute, over all sequences: 1 for each that decodes, more while a prompt is being computed."""
    @property
    def num_unshared_blocks(self) -> int:
        """Distinct blocks that no other group holds: what the pool regains when it gives way."""
    @property
    def num_published_tokens(self) -> int:
        """Tokens in its blocks that the prefix cache can find again: not lost when it gives way, until they are evicted."""
    @property
    def num_unpublished_tokens(self) -> int:
        """Distinct computed tokens in its blocks that the prefix cache can't find again: lost when it gives way by recompute."""
    @property
    def num_cacheable_tokens(self) -> int:
        """Tokens, prompt and output, from the first on that it may publish (see `Request.cache_until`); huge where all may be."""
    @property
    def num_preemptions(self) -> int:
        """Times it gave way."""
    @property
    def admitted_step(self) -> int:
        """Step of its last entry into running (-1: never)."""
    @property
    def admission_order(self) -> int:
        """Rank of its first admission in the run (-1: never)."""
    @property
    def oracle_output_len(self) -> int | None:
        """True output length where a trace knows it."""


class QueuesView(Protocol):
    """The scheduler's three queues, read-only, in their order."""

    @property
    def waiting(self) -> Sequence[GroupView]:
        """Preempted groups first, then by the scheduling policy."""
    @property
    def running(self) -> Sequence[GroupView]:
        """In order of entry."""
    @property
    def swapped(self) -> Sequence[GroupView]:
        """In order of return."""
    @property
    def num_waiting(self) -> int:
        """len(waiting), without building it."""
