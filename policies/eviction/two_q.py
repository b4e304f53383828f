"""2Q (full version)."""

from __future__ import annotations

from collections import OrderedDict

from kvlab.policies.base import EvictionPolicy, is_number, require
from kvlab.policies.eviction._queues import FifoQueue, Ghosts
from kvlab.types import BlockView, Now


class TwoQ(EvictionPolicy):
    """New blocks pass through a short FIFO queue (A1in); only what comes back after it has left, while its name is still remembered
    (A1out), enters the LRU list of the hot (Am).

    Source: Johnson and Shasha, "2Q: a low overhead high performance buffer management replacement algorithm" (VLDB 1994),
        https://www.vldb.org/conf/1994/P439.PDF
    Parameters: a1in: share of the pool above which A1in gives up blocks, in (0, 1). a1out: contents remembered, as a share of the
        pool's blocks, at least 0.
    Deviations: being let go is a use in Am, as in lru. Where the queue whose turn it is holds no candidate, the other gives one.
    """

    def __init__(self, a1in: float = 0.25, a1out: float = 0.5) -> None:
        require(is_number(a1in) and 0 < a1in < 1, self, "a1in", a1in, "a share in (0, 1)")
        require(is_number(a1out) and 0 <= a1out < 1e9, self, "a1out", a1out, "a number of at least 0")
        self.a1in = a1in
        self.a1out = a1out
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.bind(0)

    def bind(self, num_blocks: int) -> None:
        """Sizes of the queues."""
        self._a1in_capacity = int(self.a1in * num_blocks)
        self._a1in = FifoQueue()
        self._a1out = Ghosts(int(self.a1out * num_blocks))
        self._am: OrderedDict[int, None] = OrderedDict()  # candidates, least recently used first
        self._returning = b""

    def miss(self, content: bytes, now: Now) -> None:
        """Looked up in A1out before the eviction that could make A1out forget it."""
        if self._a1out.take(content):
            self._returning = content

    def insert(self, block: BlockView, now: Now) -> None:
        """Into Am if A1out remembers it, else into A1in."""
        if not (block.content == self._returning or self._a1out.take(block.content)):
            self._a1in.push(block.block_id, ready=False)
        self._returning = b""

    def hit(self, block: BlockView, now: Now) -> None:
        """Nothing changes in A1in."""
        if block.block_id in self._a1in:
            self._a1in.set_held(block.block_id)
        else:
            self._am.pop(block.block_id, None)

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """A candidate: in A1in where it was, in Am the most recently used."""
        if block.block_id in self._a1in:
            self._a1in.set_ready(block.block_id)
        else:
            self._am[block.block_id] = None

    def victim(self, now: Now) -> int:
        """The oldest of A1in while that is too long, else the least recently used of Am."""
        if self._am and len(self._a1in) <= self._a1in_capacity:
            return next(iter(self._am))
        oldest = self._a1in.oldest()
        return oldest if oldest >= 0 else next(iter(self._am))

    def evict(self, block: BlockView, now: Now) -> None:
        """Remembered if it was in A1in."""
        if block.block_id in self._a1in:
            self._a1in.remove(block.block_id)
            self._a1out.add(block.content)
        else:
            self._am.pop(block.block_id, None)
