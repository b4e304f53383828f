"""First in, first out."""

from __future__ import annotations

from kvlab.policies.base import KeyEviction
from kvlab.types import BlockView


class Fifo(KeyEviction):
    """The block that has been in the cache longest goes, however often it was used.

    Source: the classic; see Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023),
        https://doi.org/10.1145/3600006.3613147
    Parameters: none.
    Deviations: a block that is held keeps its place in the queue and is passed over. Blocks are inserted head to tail, so the
        head of a prompt goes before its tail, which leaves the tail unfindable.
    """

    def key(self, block: BlockView) -> tuple[float, ...]:
        """Tick of its insert."""
        return (block.inserted_tick,)
