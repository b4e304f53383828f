"""Traditional batching: a batch is formed, runs to its end, then the next one is formed."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import NO_TOKEN_LIMIT, RUNNING, SWAPPED, WAITING, BatchingPolicy
from kvlab.types import Now, QueuesView


class Static(BatchingPolicy):
    """A batch is formed only when nothing runs or is swapped; prompts are computed whole, whatever their length.

    Source: `transformers` generate on padded batches, https://huggingface.co/docs/transformers/llm_tutorial; "request-level
        scheduling" in Orca (Yu et al., OSDI 2022), https://www.usenix.org/conference/osdi22/presentation/yu
    Parameters: none. The batch size is the engine's max_num_seqs; max_num_batched_tokens limits nothing.
    Deviations: no padding is computed, and a finished sequence leaves the step at once (its place stays empty until the batch
        ends). A group preempted for recompute comes back with the next batch.
    """

    has_token_limit = False

    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        """The batch under way, or a new one when there is none."""
        if queues.running or queues.swapped:
            return ((RUNNING, SWAPPED),)
        return ((WAITING,),)

    def token_budget(self, queues: QueuesView, max_num_batched_tokens: int) -> int:
        """No limit of tokens: the whole batch is prefilled in one step."""
        return max(NO_TOKEN_LIMIT, max_num_batched_tokens)

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        """All or nothing."""
        return num_uncomputed if num_uncomputed <= budget else 0
