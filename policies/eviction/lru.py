"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from kvlab.policies.base import EvictionPolicy
from kvlab.types import BlockView, Now


class Lru(EvictionPolicy):
    """The block that was used longest ago goes; being inserted, hit or let go is a use.

    Source: the classic; vLLM's and SGLang's default. A prompt's blocks are let go tail first, so its tail goes first
        (https://docs.vllm.ai/en/latest/design/prefix_caching.html).
    Parameters: none.
    Deviations: none.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._order: OrderedDict[int, None] = OrderedDict()  # candidates in the order they were let go, which is that of their last uses

    def hit(self, block: BlockView, now: Now) -> None:
        """Held again: no candidate."""
        self._order.pop(block.block_id, None)

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """The most recently used candidate."""
        self._order[block.block_id] = None

    def victim(self, now: Now) -> int:
        """The candidate that was let go first."""
        return next(iter(self._order))

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone."""
        self._order.pop(block.block_id, None)

    def demand_fill(self, requests: Sequence[Sequence[Hashable]], capacity: int) -> tuple[list[int], list[int], list[Hashable]]:
        """Replay's semantics access without events, in a third of the time: the same decisions, since nothing stays held and the order
        of uses is that of accesses. (Object hits and prefix hits by request, ids evicted in order.)"""
        cache: OrderedDict[Hashable, None] = OrderedDict()
        use, forget = cache.move_to_end, cache.popitem
        object_hits: list[int] = []
        prefix_hits: list[int] = []
        evicted: list[Hashable] = []
        num_free = capacity
        for request in requests:
            num_hits, prefix = 0, -1  # -1: all were hits so far
            for block_id in request:
                if block_id in cache:
                    num_hits += 1
                    use(block_id)
                    continue
                if prefix < 0:
                    prefix = num_hits
                if num_free:
                    num_free -= 1
                else:
                    evicted.append(forget(False)[0])
                cache[block_id] = None
            object_hits.append(num_hits)
            prefix_hits.append(num_hits if prefix < 0 else prefix)
        return object_hits, prefix_hits, evicted
