"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict

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
