"""Length-aware (Mooncake)."""

from __future__ import annotations

from kvlab.policies.base import KeyEviction
from kvlab.types import BlockView


class LengthAware(KeyEviction):
    """The block with the fewest hits goes, as in LFU; among those with as few, the one that stands latest in its request.

    Source: Qin et al., "Mooncake: trading more storage for less computation" (FAST 2025), section 4 (LengthAwareCache),
        https://www.usenix.org/conference/fast25/presentation/qin
    Parameters: none.
    Deviations: the paper says no more than the sentence above; here the place in the request is the block's index in it, and among
        equals the one that reached its count first goes. Counts never age.
    """

    def key(self, block: BlockView) -> tuple[float, ...]:
        """(hits, depth, deepest first, tick of its last insert or hit)."""
        return (block.num_hits, -block.depth, block.counted_tick)
