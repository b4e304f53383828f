"""Stall-free batches: decodes first, then chunks of prompts, within a token budget."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import RUNNING, SWAPPED, WAITING, BatchingPolicy, is_decoding, is_whole, require
from kvlab.types import GroupView, Now, QueuesView


class Sarathi(BatchingPolicy):
    """Every step serves all decodes, then fills a budget of tokens with chunks of prompts, those begun before new ones: the budget
    bounds how much a prompt can delay the next tokens of others.

    Source: Sarathi-Serve (Agrawal et al., OSDI 2024), https://arxiv.org/abs/2403.02310, algorithm 3.
    Parameters: chunk_size: tokens a step computes, decodes included (512 there for strict, 2048 for relaxed goals); decodes alone may
        take more. Never more than the engine's max_num_batched_tokens.
    Deviations: chunks are not rounded to the tiles of a matrix product. A prompt's blocks are taken chunk by chunk (there all at
        entry: pair it with admission full_sequence). With chunk_size = max_num_batched_tokens it is the FIFO scheduler of
        transformers' continuous batching.
    """

    def __init__(self, chunk_size: int = 512) -> None:
        is_count = is_whole(chunk_size) and chunk_size >= 1
        require(is_count, self, "chunk_size", chunk_size, "tokens a step, a positive integer")
        self.chunk_size = chunk_size

    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        """One mixed step."""
        return ((RUNNING, SWAPPED, WAITING),)

    def token_budget(self, queues: QueuesView, max_num_batched_tokens: int) -> int:
        """chunk_size, or as many as decode."""
        num_sequences = sum(group.num_sequences for groups in (queues.running, queues.swapped) for group in groups)
        return min(max(self.chunk_size, num_sequences), max_num_batched_tokens)

    def running_order(self, running: Sequence[GroupView], now: Now) -> Sequence[GroupView]:
        """Decodes, then prompts, each in order of entry."""
        return sorted(running, key=lambda group: not is_decoding(group))

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        """As much as the budget allows."""
        return min(num_uncomputed, budget)
