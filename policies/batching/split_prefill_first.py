"""Mixed steps in which prompts that were cut go on before anybody decodes."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import RUNNING, SWAPPED, WAITING, BatchingPolicy, is_decoding
from kvlab.types import GroupView, Now, QueuesView


class SplitPrefillFirst(BatchingPolicy):
    """Every step goes on with prompts that were cut, then serves decodes, then begins new prompts, up to one token budget.

    Source: `PrefillFirstScheduler` of transformers' continuous batching,
        https://github.com/huggingface/transformers/blob/main/src/transformers/generation/continuous_batching/scheduler.py
        (its default, `FIFOScheduler`, is sarathi with chunk_size = max_num_batched_tokens and admission watermark 0.2).
    Parameters: none. The budget is the engine's max_num_batched_tokens.
    Deviations: a request that finds no block is skipped there; here somebody gives way, by the preemption policy.
    """

    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        """One mixed step."""
        return ((RUNNING, SWAPPED, WAITING),)

    def running_order(self, running: Sequence[GroupView], now: Now) -> Sequence[GroupView]:
        """Prompts, then decodes, each in order of entry."""
        return sorted(running, key=is_decoding)

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        """As much as the budget allows."""
        return min(num_uncomputed, budget)
