"""Mixed steps under one token budget."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import RUNNING, SWAPPED, WAITING, BatchingPolicy
from kvlab.types import Now, QueuesView


class Chunked(BatchingPolicy):
    """Every step mixes decodes and pieces of prompts up to one token budget; running groups are served first.

    Source: Sarathi-Serve (Agrawal et al., OSDI 2024), https://arxiv.org/abs/2403.02310; vLLM V1's scheduler,
        https://docs.vllm.ai/en/latest/configuration/optimization.html#chunked-prefill
    Parameters: none. The budget is the engine's max_num_batched_tokens.
    Deviations: running groups are served in order of entry as in V1, so an unfinished prompt that entered early goes before later
        decodes; Sarathi serves all decodes first.
    """

    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        """One mixed step."""
        return ((RUNNING, SWAPPED, WAITING),)

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        """As much as the budget allows."""
        return min(num_uncomputed, budget)
