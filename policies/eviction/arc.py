"""ARC: adaptive replacement cache."""

from __future__ import annotations

from collections import OrderedDict

from kvlab.policies.base import EvictionPolicy
from kvlab.types import BlockView, Now


class Arc(EvictionPolicy):
    """Two LRU lists, of blocks seen once (T1) and more often (T2), and the names of what either lost (B1, B2): a block that comes back
    shifts room towards the list that lost it too early.

    Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003), figure 4, with a real-valued p,
        https://www.usenix.org/conference/fast-03/arc-self-tuning-low-overhead-replacement-cache
    Parameters: none.
    Deviations: none where a miss is known before room is made for it (semantics access of replay). An engine makes room first and
        publishes later: there p moves at publication, and the tie |T1| = p always goes to T2. Being let go is a use, as in lru. Where
        the list whose turn it is holds no candidate, the other gives one.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.bind(0)

    def bind(self, num_blocks: int) -> None:
        """The pool's size is c."""
        self._capacity = num_blocks
        self._p = 0.0  # size that T1 should have
        self._t1: OrderedDict[int, None] = OrderedDict()  # candidates, least recently used first; held blocks are in no list
        self._t2: OrderedDict[int, None] = OrderedDict()
        self._in_t2: dict[int, bool] = {}  # of all blocks in the cache
        self._num_t1 = 0  # with those held
        self._b1: OrderedDict[bytes, None] = OrderedDict()
        self._b2: OrderedDict[bytes, None] = OrderedDict()
        self._returning = b""
        self._from_b2 = False

    def miss(self, content: bytes, now: Now) -> None:
        """Move p if B1 or B2 remembers it, which it does no more then."""
        if content in self._b1:
            self._p = min(self._p + max(1.0, len(self._b2) / len(self._b1)), self._capacity)
            del self._b1[content]
            self._returning = content
        elif content in self._b2:
            self._p = max(self._p - max(1.0, len(self._b1) / len(self._b2)), 0.0)
            del self._b2[content]
            self._returning = content
            self._from_b2 = True

    def insert(self, block: BlockView, now: Now) -> None:
        """Into T2 if it was remembered, else into T1."""
        if block.content != self._returning:
            self.miss(block.content, now)
        returns = block.content == self._returning
        self._in_t2[block.block_id] = returns
        self._num_t1 += not returns
        self._returning, self._from_b2 = b"", False
        if not returns:
            self._trim()

    def _trim(self) -> None:
        """|T1| + |B1| is at most c, all four together at most 2c."""
        num_blocks, b1, b2 = len(self._in_t2), self._b1, self._b2
        while b1 and self._num_t1 + len(b1) > self._capacity:
            b1.popitem(last=False)
        while b2 and num_blocks + len(b1) + len(b2) > 2 * self._capacity:
            b2.popitem(last=False)

    def hit(self, block: BlockView, now: Now) -> None:
        """Into T2."""
        block_id = block.block_id
        if self._in_t2[block_id]:
            self._t2.pop(block_id, None)
        else:
            self._t1.pop(block_id, None)
            self._in_t2[block_id] = True
            self._num_t1 -= 1

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """The most recently used of its list."""
        (self._t2 if self._in_t2[block.block_id] else self._t1)[block.block_id] = None

    def victim(self, now: Now) -> int:
        """REPLACE: the least recently used of T1 while that is larger than p, else of T2."""
        num_t1 = self._num_t1
        from_t1 = num_t1 > self._p or (self._from_b2 and num_t1 == self._p)
        return next(iter((self._t1 or self._t2) if from_t1 else (self._t2 or self._t1)))

    def evict(self, block: BlockView, now: Now) -> None:
        """Remembered by the list that lost it."""
        block_id = block.block_id
        if self._in_t2.pop(block_id):
            self._t2.pop(block_id, None)
            self._b2[block.content] = None
        else:
            self._t1.pop(block_id, None)
            self._num_t1 -= 1
            self._b1[block.content] = None
