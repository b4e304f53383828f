"""A random block."""

from __future__ import annotations

from hashlib import blake2b

from kvlab.policies.base import EvictionPolicy, is_whole, require
from kvlab.types import BlockView, Now


class Random(EvictionPolicy):
    """Any candidate goes, each with the same chance: the baseline that a policy has to beat. O(1) an event.

    Source: the classic; Redis's `allkeys-random`, https://redis.io/docs/latest/develop/reference/eviction/
    Parameters: seed: any integer; the same seed and the same events give the same victims.
    Deviations: draws are blake2b(seed, number of evictions so far) mod candidates, not a generator's stream: a draw depends on
        nothing but these and the candidates.
    """

    def __init__(self, seed: int = 0) -> None:
        require(is_whole(seed), self, "seed", seed, "an integer")
        self.seed = seed
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._candidates: list[int] = []
        self._index: dict[int, int] = {}
        self._num_evicted = 0

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """Make it a candidate."""
        self._index[block.block_id] = len(self._candidates)
        self._candidates.append(block.block_id)

    def hit(self, block: BlockView, now: Now) -> None:
        """Held again: no candidate. (A second holder hits a block that is none already.)"""
        self._drop(block.block_id)

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone; the next draw is another one."""
        self._drop(block.block_id)
        self._num_evicted += 1

    def victim(self, now: Now) -> int:
        """A draw among the candidates; asked again before anything changed, it answers the same."""
        digest = blake2b(b"%d/%d" % (self.seed, self._num_evicted), digest_size=8).digest()
        return self._candidates[int.from_bytes(digest, "little") % len(self._candidates)]

    def _drop(self, block_id: int) -> None:
        """Remove by moving the last candidate into its place."""
        index = self._index.pop(block_id, None)
        if index is None:
            return
        last = self._candidates.pop()
        if last != block_id:
            self._candidates[index] = last
            self._index[last] = index
