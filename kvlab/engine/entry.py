"""A group that wants to enter running, as an admission policy sees it (`EntryView`)."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.cache.manager import KVCacheManager
from kvlab.engine.read_only import ReadOnly
from kvlab.engine.sequence import SequenceGroup


class Entry:
    """What entering would take: blocks not found in the cache, shared prefixes counted once.

    Args:
        kind: "new", "resumed" or "swapped_in". hits: cached blocks found. first_chunk_tokens: tokens its tables cover after its
            first chunk, cached ones included.
    """

    def __init__(self, group: SequenceGroup, kind: str, hits: list[int], first_chunk_tokens: int, running: Sequence[SequenceGroup],
                 kv: KVCacheManager) -> None:  # fmt: skip
        self.group = group
        self.kind = kind
        self._hits = hits
        self.first_chunk_tokens = first_chunk_tokens
        self.running = ReadOnly(running)
        self.num_available_blocks = kv.num_available(hits)
        self._kv = kv

    def blocks_for(self, num_tokens: int) -> int:
        """New blocks to hold `num_tokens` of each sequence, beyond what is cached or shared."""
        kv, group = self._kv, self.group
        first = group.seqs[0]
        if kv.regions is not None:
            return kv.region_blocks(first, num_tokens) * group.num_sequences - len(self._hits)
        if self.kind == "swapped_in":
            held = [s.table for s in group.seqs if s.table is not None]
            grown = sum(max(0, -(-(num_tokens - table.capacity) // kv.block_size)) for table in held)
            return len(kv.swapper.swapped_block_ids(group)) + grown + self._unattached_blocks(num_tokens)
        return max(0, kv.num_blocks_for(num_tokens) - len(self._hits)) + self._unattached_blocks(num_tokens)

    def _unattached_blocks(self, num_tokens: int) -> int:
        """Own blocks of sequences that still have to branch off, from the branching point on."""
        group, kv = self.group, self._kv
        if group.is_forked:
            points = [s.attach_at for s in group.seqs if s.attach_to is not None]
        else:
            points = [group.num_prompt_tokens] * (group.num_sequences - 1)
        return sum(kv.num_blocks_for(num_tokens) - at // kv.block_size for at in points if num_tokens > at)
