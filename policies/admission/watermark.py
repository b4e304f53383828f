"""Admission with a reserve of blocks."""

from __future__ import annotations

from kvlab.policies.base import AdmissionPolicy, EntryView, is_number, require
from kvlab.types import Now, PoolView


class Watermark(AdmissionPolicy):
    """A group enters only if a share of the pool stays free afterwards, so that those running can grow for a while.

    Source: vLLM's block manager (`watermark_blocks`), https://github.com/vllm-project/vllm/blob/v0.6.6/vllm/core/block_manager.py
    Parameters: fraction: share of the pool kept free, in [0, 1) (int(fraction * N) blocks). full_sequence: test the blocks of the
        whole known sequence instead of those of its first chunk.
    Deviations: free blocks include cached ones that nobody holds and this group does not hit; vLLM v0 counted those as free too,
        hit or not.
    """

    def __init__(self, fraction: float = 0.01, full_sequence: bool = False) -> None:
        require(is_number(fraction) and 0 <= fraction < 1, self, "fraction", fraction, "in [0, 1); 0 keeps no reserve")
        require(isinstance(full_sequence, bool), self, "full_sequence", full_sequence, "true or false")
        self.fraction = fraction
        self.full_sequence = full_sequence

    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        """need + int(fraction * N) <= available."""
        num_tokens = entry.group.num_tokens if self.full_sequence else entry.first_chunk_tokens
        need = entry.blocks_for(num_tokens)
        if need + self.headroom_blocks(pool) <= entry.num_available_blocks:
            return ""
        return "watermark" if need <= entry.num_available_blocks else "blocks"

    def headroom_blocks(self, pool: PoolView) -> int:
        """int(fraction * N), rounded down as in vLLM."""
        return int(self.fraction * pool.num_blocks)
