"""Least frequently used."""

from __future__ import annotations

from kvlab.policies.base import KeyEviction
from kvlab.types import BlockView


class Lfu(KeyEviction):
    """The block with the fewest hits since its insert goes; among equals the one that reached its count first.

    Source: the classic in-cache LFU; see Shah et al., "An O(1) algorithm for implementing the LFU cache eviction scheme" (2010),
        http://dhruvbird.com/lfu.pdf
    Parameters: none.
    Deviations: counts are forgotten at eviction and never age.
    """

    def key(self, block: BlockView) -> tuple[float, ...]:
        """(hits, tick of its last insert or hit)."""
        return (block.num_hits, block.counted_tick)
