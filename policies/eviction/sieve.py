"""SIEVE."""

from __future__ import annotations

from bisect import bisect_left

from kvlab.policies.base import EvictionPolicy
from kvlab.types import BlockView, Now


class Sieve(EvictionPolicy):
    """A hand goes from the oldest block to the newest: one that was hit since is spared once and stays where it is, the first other one
    goes. New blocks come in behind all others, so the hand sifts them soon.

    Source: Zhang et al., "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web caches" (NSDI 2024),
        https://www.usenix.org/conference/nsdi24/presentation/zhang-yazhuo
    Parameters: none.
    Deviations: none. A held block keeps place and bit when the hand passes.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._hand = 0
        self._place: dict[int, int] = {}  # block id -> place, oldest first; places of those that left are not used again
        self._order: list[int] = []  # by place: block id
        self._visited = bytearray()  # by place: hit since the hand came by
        self._spared = bytearray()  # by place: a candidate that is visited
        self._next = bytearray()  # by place: a candidate that is not

    def insert(self, block: BlockView, now: Now) -> None:
        """The newest; not visited."""
        if len(self._order) > 2 * len(self._place) + 16:
            self._compact()
        self._place[block.block_id] = len(self._order)
        self._order.append(block.block_id)
        self._visited.append(0)
        self._spared.append(0)
        self._next.append(0)

    def hit(self, block: BlockView, now: Now) -> None:
        """Visited; held: no candidate."""
        place = self._place[block.block_id]
        self._visited[place] = 1
        self._spared[place] = self._next[place] = 0

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """A candidate."""
        place = self._place[block.block_id]
        if self._visited[place]:
            self._spared[place] = 1
        else:
            self._next[place] = 1

    def victim(self, now: Now) -> int:
        """Move the hand to the first candidate that is not visited, taking the bits of those it passes. Bytes are searched at memory
        speed."""
        hand, find = self._hand, self._next.find
        while (place := find(1, hand)) < 0:
            self._take_bits(hand, len(self._next))
            hand = 0
        self._take_bits(hand, place)
        self._hand = place
        return self._order[place]

    def _take_bits(self, start: int, stop: int) -> None:
        place = self._spared.find(1, start, stop)
        while place >= 0:
            self._spared[place] = self._visited[place] = 0
            self._next[place] = 1
            place = self._spared.find(1, place + 1, stop)

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone. If it was the newest and under the hand, the hand starts again with the oldest."""
        place = self._place.pop(block.block_id)
        self._spared[place] = self._next[place] = 0
        if place == self._hand and next(reversed(self._place.values()), -1) < place:
            self._hand = 0

    def _compact(self) -> None:
        """Close the gaps."""
        places = list(self._place.values())
        self._hand = bisect_left(places, self._hand)
        self._visited, self._spared, self._next = (
            bytearray(map(bits.__getitem__, places)) for bits in (self._visited, self._spared, self._next)
        )
        self._order = list(self._place)
        self._place = {block_id: place for place, block_id in enumerate(self._order)}
