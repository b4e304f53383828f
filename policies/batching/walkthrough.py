"""The phase order of the walkthrough engine: running, waiting, swapped."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import NO_TOKEN_LIMIT, RUNNING, SWAPPED, WAITING, BatchingPolicy
from kvlab.types import Now, QueuesView


class Walkthrough(BatchingPolicy):
    """What runs goes first, new requests join it with whole prompts, and swapped ones come back last.

    Source: the simplified scheduler of a walkthrough of vLLM (continuous batching in three phases), after vLLM 0.1,
        https://github.com/vllm-project/vllm/blob/v0.1.0/vllm/core/scheduler.py
    Parameters: none. No token limit, whatever max_num_batched_tokens says: a step is bounded by max_num_seqs and by the blocks there are.
    Deviations: the engine admits nobody while a group is swapped out, so new requests don't overtake swapped ones (there they did,
        for ever if enough came), and when nothing runs swapped groups go first.
    """

    has_token_limit = False

    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        """One mixed step; a swapped group is not overtaken once the pool has drained."""
        if queues.swapped and not queues.running:
            return ((SWAPPED, WAITING),)
        return ((RUNNING, WAITING, SWAPPED),)

    def token_budget(self, queues: QueuesView, max_num_batched_tokens: int) -> int:
        """No limit of tokens."""
        return max(NO_TOKEN_LIMIT, max_num_batched_tokens)

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        """All or nothing."""
        return num_uncomputed if num_uncomputed <= budget else 0
