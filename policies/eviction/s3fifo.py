"""S3-FIFO."""

from __future__ import annotations

from kvlab.policies.base import EvictionPolicy, is_number, require
from kvlab.policies.eviction._queues import FifoQueue, Ghosts
from kvlab.types import BlockView, Now

MAX_COUNT = 3
"""Two bits."""


class S3Fifo(EvictionPolicy):
    """Three FIFO queues: new blocks pass through a small one and reach the main one only if they were hit, or come back while the ghost
    queue remembers them; in the main one each hit buys another round.

    Source: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), algorithm 1,
        https://doi.org/10.1145/3600006.3613147
    Parameters: small: share of the pool that the small queue has, in (0, 1). ghost: contents remembered, as a share of the pool's
        blocks, at least 0. promote_at: hits (1 to 3) in the small queue that earn a place in the main one.
    Deviations: while nothing was evicted yet and the small queue is full, new blocks go to the main queue (as in the authors'
        simulator, libCacheSim). Where the queue whose turn it is holds no candidate, the other gives one.
    """

    def __init__(self, small: float = 0.1, ghost: float = 0.9, promote_at: int = 2) -> None:
        require(is_number(small) and 0 < small < 1, self, "small", small, "a share in (0, 1)")
        require(is_number(ghost) and 0 <= ghost < 1e9, self, "ghost", ghost, "a number of at least 0")
        require(type(promote_at) is int and 1 <= promote_at <= MAX_COUNT, self, "promote_at", promote_at, "1, 2 or 3 hits")
        self.small = small
        self.ghost = ghost
        self.promote_at = promote_at
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.bind(0)

    def bind(self, num_blocks: int) -> None:
        """Sizes of the queues."""
        self._small_capacity = max(1, int(self.small * num_blocks))
        self._small = FifoQueue()
        self._main = FifoQueue()
        self._ghosts = Ghosts(int(self.ghost * num_blocks))
        self._count: dict[int, int] = {}  # block id -> hits, up to 3
        self._has_evicted = False
        self._returning = b""
        self._victim = -1

    def miss(self, content: bytes, now: Now) -> None:
        """Looked up among the ghosts before the eviction that could make them forget it."""
        if self._ghosts.take(content):
            self._returning = content

    def insert(self, block: BlockView, now: Now) -> None:
        """Into the main queue if it is remembered, else into the small one."""
        to_main = block.content == self._returning or self._ghosts.take(block.content)
        if not self._has_evicted and len(self._small) >= self._small_capacity:
            to_main = True
        (self._main if to_main else self._small).push(block.block_id, ready=False)
        self._count[block.block_id] = 0
        self._returning = b""

    def hit(self, block: BlockView, now: Now) -> None:
        """Counted; it stays where it is."""
        block_id = block.block_id
        self._count[block_id] = min(self._count[block_id] + 1, MAX_COUNT)
        self._queue(block_id).set_held(block_id)
        if block_id == self._victim:
            self._victim = -1

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """A candidate."""
        self._queue(block.block_id).set_ready(block.block_id)

    def victim(self, now: Now) -> int:
        """The first of the small queue that was not hit enough, or of the main one without hits left. Asked again, the same."""
        if self._victim < 0:
            from_small = len(self._small) >= self._small_capacity
            found = self._from_small() if from_small else self._from_main()
            if found < 0:  # no candidate there (left)
                found = self._from_main() if from_small else self._from_small()
            self._victim = found if found >= 0 else self._from_main()
        return self._victim

    def _from_small(self) -> int:
        """Promote until one is found that is not worth it; -1: no candidate is left."""
        small, main, count = self._small, self._main, self._count
        while (block_id := small.oldest()) >= 0 and count[block_id] >= self.promote_at:
            small.remove(block_id)
            main.push(block_id, ready=True)
            count[block_id] = 0
        return block_id

    def _from_main(self) -> int:
        """Send to the end, one hit poorer, until one is found that has none; -1: no candidate."""
        main, count = self._main, self._count
        while (block_id := main.oldest()) >= 0 and count[block_id]:
            main.remove(block_id)
            main.push(block_id, ready=True)
            count[block_id] -= 1
        return block_id

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone; remembered if it was in the small queue."""
        block_id = block.block_id
        if block_id in self._small:
            self._ghosts.add(block.content)
        self._queue(block_id).remove(block_id)
        del self._count[block_id]
        self._has_evicted = True
        self._victim = -1

    def _queue(self, block_id: int) -> FifoQueue:
        return self._small if block_id in self._small else self._main
