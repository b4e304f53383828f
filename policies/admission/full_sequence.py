"""Admission of whole sequences."""

from __future__ import annotations

from kvlab.policies.base import AdmissionPolicy, EntryView
from kvlab.types import Now, PoolView


class FullSequence(AdmissionPolicy):
    """A group enters only if the blocks of all its known tokens are there, not only those of its first chunk.

    Source: vLLM V1's `scheduler_reserve_full_isl`, https://docs.vllm.ai/en/stable/api/vllm/config/scheduler/: long chunked
        prompts that can't all be finished no longer enter together and preempt one another.
    Parameters: none. As a switch of the policies that test the first chunk: full_sequence of none, watermark and adaptive.
    Deviations: nothing is reserved by it, as in vLLM: the blocks are tested at entry and taken chunk by chunk. That is enough where a
        prompt in chunks takes all tokens that a step has left (nobody can ask before its last chunk); a batching policy that
        computes several prompts in chunks at once needs an admission that looks ahead (expected_output, past_future, reserve_all).
    """

    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        """Prompt and output so far must fit."""
        if entry.blocks_for(entry.group.num_tokens) <= entry.num_available_blocks:
            return ""
        return "full_sequence" if entry.blocks_for(entry.first_chunk_tokens) <= entry.num_available_blocks else "blocks"
