"""Prompts go before decodes, in steps of their own."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import RUNNING, SWAPPED, WAITING, BatchingPolicy
from kvlab.types import Now, QueuesView


class PrefillFirst(BatchingPolicy):
    """Waiting prompts are computed first, whole and in a step of their own; only a step without any lets the others decode.

    Source: vLLM v0's default scheduler (`_schedule_default`),
        https://github.com/vllm-project/vllm/blob/v0.6.6/vllm/core/scheduler.py; Kwon et al., SOSP 2023,
        https://arxiv.org/abs/2309.06180
    Parameters: none. While anything is swapped no prompt is taken, as there.
    Deviations: a prompt longer than max_num_batched_tokens is computed in pieces (v0 refuses it); its later pieces run beside
        decodes, since by then its group is running, and the last piece waits for a step with room for the whole of it.
    """

    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        """Prompts alone, else what runs; with something swapped: what runs, then its return."""
        if queues.swapped:
            return ((RUNNING, SWAPPED),)
        return ((WAITING,), (RUNNING,))

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        """All, or for what no step could hold: as much as fits now."""
        if num_uncomputed <= budget:
            return num_uncomputed
        return budget if num_uncomputed > max_num_batched_tokens else 0
