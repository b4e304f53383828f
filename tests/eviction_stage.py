"""A block pool on which requests are played for an eviction policy, in a notation of letters."""

from __future__ import annotations

from kvlab.cache.pool import BlockPool, CachedBlock
from kvlab.policies.base import EvictionPolicy
from kvlab.policies.layout import Paged
from kvlab.types import Now


class Stage:
    """A pool on which requests are played; a letter is a block's content and always follows the same letters."""

    def __init__(self, policy: EvictionPolicy, num_blocks: int, block_size: int = 16) -> None:
        self.gone = ""
        self.pool = BlockPool("gpu", num_blocks, block_size, policy, Paged(), self._note)

    def _note(self, kind: str, tier: str, block: CachedBlock) -> None:
        if kind == "evict":
            self.gone += block.content.decode()

    def hold(self, names: str) -> list[int]:
        """A request hits the longest cached prefix, takes and publishes the rest head to tail, and keeps it."""
        found = [self.pool.find(name.encode()) for name in names]
        hits = [block for block in found[: found.index(None) if None in found else None] if block is not None]
        self.pool.hit(hits)
        fresh = self.pool.allocate(len(names) - len(hits))
        assert fresh is not None
        for depth, block_id in enumerate(fresh, len(hits)):
            self.pool.publish(block_id, names[depth].encode(), names[depth - 1].encode() if depth else None, depth)
        return hits + fresh

    def let_go(self, blocks: list[int]) -> None:
        """Tail first."""
        self.pool.release(reversed(blocks))

    def serve(self, *requests: str) -> str:
        """One after the other; what has gone so far."""
        for names in requests:
            self.let_go(self.hold(names))
        return self.gone

    def at(self, now_s: float) -> Stage:
        """From here on it is `now_s`."""
        self.pool.now = Now(self.pool.now.step + 1, now_s)
        return self


def evicted(policy: EvictionPolicy, num_blocks: int, requests: str, block_size: int = 16) -> str:
    return Stage(policy, num_blocks, block_size).serve(*requests.split())
