"""Clock (second chance)."""

from __future__ import annotations

from kvlab.policies.base import EvictionPolicy
from kvlab.types import BlockView, Now


class Clock(EvictionPolicy):
    """A hand goes round the blocks of the pool: one that was hit since it last came by is spared once, the first other one goes.

    Source: Corbato, "A paging experiment with the Multics system" (MIT Project MAC, 1968),
        https://multicians.org/paging-experiment.pdf
    Parameters: none.
    Deviations: the bit is set by hits, not by the insert (as in most cache simulators). The ring is the pool's blocks by index, as
        Corbato's is by page frame: a new block takes its victim's place.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.bind(0)

    def bind(self, num_blocks: int) -> None:
        """One byte a block each."""
        self._hand = 0
        self._referenced = bytearray(num_blocks)  # hit since the hand came by
        self._spared = bytearray(num_blocks)  # candidates that are referenced
        self._next = bytearray(num_blocks)  # candidates that are not

    def insert(self, block: BlockView, now: Now) -> None:
        """Not yet referenced."""
        self._referenced[block.block_id] = 0

    def hit(self, block: BlockView, now: Now) -> None:
        """Referenced; held: no candidate."""
        block_id = block.block_id
        self._referenced[block_id] = 1
        self._spared[block_id] = self._next[block_id] = 0

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """A candidate."""
        block_id = block.block_id
        if self._referenced[block_id]:
            self._spared[block_id] = 1
        else:
            self._next[block_id] = 1

    def victim(self, now: Now) -> int:
        """Move the hand to the first candidate without a bit, taking the bits of those it passes. Bytes are searched at memory speed."""
        hand, find = self._hand, self._next.find
        while (place := find(1, hand)) < 0:
            self._take_bits(hand, len(self._next))
            hand = 0
        self._take_bits(hand, place)
        self._hand = place
        return place

    def _take_bits(self, start: int, stop: int) -> None:
        place = self._spared.find(1, start, stop)
        while place >= 0:
            self._spared[place] = self._referenced[place] = 0
            self._next[place] = 1
            place = self._spared.find(1, place + 1, stop)

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone; if it was under the hand, the hand goes on behind it."""
        block_id = block.block_id
        self._spared[block_id] = self._next[block_id] = 0
        if block_id == self._hand:
            self._hand = block_id + 1
