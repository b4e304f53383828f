"""Never hit first."""

from __future__ import annotations

from kvlab.policies.base import KeyEviction
from kvlab.types import BlockView


class NeverHitFirst(KeyEviction):
    """Blocks that nobody has hit since they came in go before all others; among equals the one used longest ago.

    Source: the two-level baseline behind segmented LRU and 2Q, with a bit instead of a list: most blocks of production traces are never
        hit (Wang et al., "KVCache cache in the wild", USENIX ATC 2025, https://www.usenix.org/conference/atc25/presentation/wang-jiahao).
    Parameters: none.
    Deviations: a block that was hit once keeps its rank until it goes, and a pool full of such blocks evicts each newcomer first.
    """

    def key(self, block: BlockView) -> tuple[float, ...]:
        """(was it hit, tick of its last use)."""
        return (block.num_hits > 0, block.used_tick)
