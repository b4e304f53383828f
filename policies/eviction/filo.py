"""First in, last out."""

from __future__ import annotations

from kvlab.policies.base import KeyEviction
from kvlab.types import BlockView


class Filo(KeyEviction):
    """The block that came in last goes, however often it was used: what came first stays for ever.

    Source: the classic (also LIFO); a baseline.
    Parameters: none.
    Deviations: a block that is held is passed over.
    """

    def key(self, block: BlockView) -> tuple[float, ...]:
        """Tick of its insert, latest first."""
        return (-block.inserted_tick,)
