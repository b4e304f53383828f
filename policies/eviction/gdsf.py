"""Greedy-Dual-Size-Frequency."""

from __future__ import annotations

from kvlab.policies.base import KeyEviction, require
from kvlab.types import BlockView, Now


class Gdsf(KeyEviction):
    """The block with the smallest age + uses x cost / size goes; the age is the value of the last one that went, so that old merits fade.

    Source: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy" (HP Labs HPL-98-69R1, 1998),
        https://www.hpl.hp.com/techreports/98/HPL-98-69R1.html
    Parameters: cost: tokens to recompute when it is gone. "block": its own, as the blocks before it stay; "prefix": its own and all
        before it, as if they were gone as well.
    Deviations: the blocks of a pool are of one size, so with cost=block each costs the same per token and this is LFU with dynamic
        aging. Among equal values the one used longest ago goes.
    """

    def __init__(self, cost: str = "block") -> None:
        require(cost in ("block", "prefix"), self, "cost", cost, '"block" or "prefix"')
        self.cost = cost
        super().__init__()

    def reset(self) -> None:
        """As new."""
        super().reset()
        self._age = 0.0
        self._value: dict[int, float] = {}  # block id -> value at its last insert or hit

    def _appraise(self, block: BlockView) -> None:
        tokens = block.num_tokens if self.cost == "block" else block.num_tokens * (block.depth + 1)
        self._value[block.block_id] = self._age + (block.num_hits + 1) * tokens / block.num_tokens

    def key(self, block: BlockView) -> tuple[float, ...]:
        """(value, tick of its last use)."""
        return (self._value[block.block_id], block.used_tick)

    def insert(self, block: BlockView, now: Now) -> None:
        """First use."""
        self._appraise(block)

    def hit(self, block: BlockView, now: Now) -> None:
        """Worth more, from today's age on."""
        super().hit(block, now)
        self._appraise(block)

    def evict(self, block: BlockView, now: Now) -> None:
        """The age is its value now (never less than before)."""
        super().evict(block, now)
        self._age = max(self._age, self._value.pop(block.block_id))
