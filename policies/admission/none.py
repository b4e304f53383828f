"""No admission control."""

from __future__ import annotations

from kvlab.policies.base import AdmissionPolicy, EntryView, require
from kvlab.types import Now, PoolView


class Unlimited(AdmissionPolicy):
    """Everyone may enter; only the blocks of the first chunk must be there, which the engine itself sees to.

    Source: vLLM V1 schedules so, https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/v1/core/sched/scheduler.py
    Parameters: full_sequence: test the blocks of the whole known sequence instead (then it decides as full_sequence does).
    Deviations: none.
    """

    def __init__(self, full_sequence: bool = False) -> None:
        require(isinstance(full_sequence, bool), self, "full_sequence", full_sequence, "true or false")
        self.full_sequence = full_sequence

    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        """Always, unless the whole sequence must fit and does not."""
        if not self.full_sequence or entry.blocks_for(entry.group.num_tokens) <= entry.num_available_blocks:
            return ""
        return "full_sequence" if entry.blocks_for(entry.first_chunk_tokens) <= entry.num_available_blocks else "blocks"
