"""Admission of whole sequences."""

from __future__ import annotations

from kvlab.policies.base import AdmissionPolicy, EntryView
from kvlab.types import Now, PoolView


class FullSequence(AdmissionPolicy):
    """A group enters only if the blocks of all its known tokens are there, not only those of its first chunk.

    Source: vLLM V1's `scheduler_reserve_full_isl`, https://docs.vllm.ai/en/stable/api/vllm/config/scheduler/: long chunked
        prompts that can't all be finished no longer enter together and preempt one another.
    Parameters: none. With a reserve on top: Watermark(fraction, full_sequence=True).
    Deviations: nothing is reserved by it: the blocks are tested at entry and taken chunk by chunk.
    """

    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        """Prompt and output so far must fit."""
        if entry.blocks_for(entry.group.num_tokens) <= entry.num_available_blocks:
            return ""
        return "full_sequence" if entry.blocks_for(entry.first_chunk_tokens) <= entry.num_available_blocks else "blocks"
