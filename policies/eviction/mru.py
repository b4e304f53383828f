"""Most recently used."""

from __future__ import annotations

from kvlab.policies.base import KeyEviction
from kvlab.types import BlockView


class Mru(KeyEviction):
    """The block that was used last goes: best where a loop is longer than the cache.

    Source: the classic; Chou and DeWitt, "An evaluation of buffer management strategies for relational database systems" (VLDB 1985),
        https://www.vldb.org/conf/1985/P127.PDF
    Parameters: none.
    Deviations: none. A prompt's blocks are let go tail first, so its head goes first.
    """

    def key(self, block: BlockView) -> tuple[float, ...]:
        """Tick of its last use, latest first."""
        return (-block.used_tick,)
