"""Segmented LRU."""

from __future__ import annotations

from kvlab.policies.base import EvictionPolicy, is_number, require
from kvlab.policies.eviction._queues import SegmentedLru
from kvlab.types import BlockView, Now


class Slru(EvictionPolicy):
    """New blocks are on probation; a hit moves a block to the protected segment, whose least recently used falls back when it is full.
    The least recently used on probation goes.

    Source: Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (IEEE Computer 27(3), 1994),
        https://doi.org/10.1109/2.268884
    Parameters: protected: share of the pool that is protected, in (0, 1).
    Deviations: the paper leaves the share open; 0.8 is what Caffeine uses. Being let go is a use, as in lru.
    """

    def __init__(self, protected: float = 0.8) -> None:
        require(is_number(protected) and 0 < protected < 1, self, "protected", protected, "a share in (0, 1)")
        self.protected = protected
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.bind(0)

    def bind(self, num_blocks: int) -> None:
        """Sizes of the segments."""
        self._segments = SegmentedLru(int(self.protected * num_blocks))

    def insert(self, block: BlockView, now: Now) -> None:
        """On probation."""
        self._segments.insert(block.block_id, held=True)

    def hit(self, block: BlockView, now: Now) -> None:
        """Protected."""
        self._segments.hit(block.block_id)

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """The most recently used of its segment."""
        self._segments.release(block.block_id)

    def victim(self, now: Now) -> int:
        """The least recently used on probation; when all are held there, of the protected."""
        return self._segments.victim()

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone."""
        self._segments.remove(block.block_id)
