"""Tail-optimised LRU."""

from __future__ import annotations

from kvlab.policies.base import KeyEviction, require
from kvlab.types import BlockView, Now


class Tlru(KeyEviction):
    """Blocks go first whose conversation stays under the latency threshold without them: the tokens that its next turn would have to
    compute, those behind the block and its new prompt, are at most xi. Among these, and then among the others, the least recently used.

    Source: Zhang, Li, Moallemi and Peng, "Tail-optimized caching for LLM inference" (NeurIPS 2025), https://arxiv.org/abs/2510.15152
    Parameters: threshold_tokens: xi, the uncached tokens that a turn may have to compute without its time to first token being too long,
        at least 0. next_prompt_tokens: expected new tokens of a conversation's next turn (the paper's Q), at least 0.
    Deviations: a block does not show its conversation. The longest one known to go through it counts, in blocks: the deepest block that
        ever was let go below it while it has been in the cache. So a prefix that a long conversation shares is spared for that one.
        What lies in a last, partial block is not seen.
    """

    def __init__(self, threshold_tokens: int = 1024, next_prompt_tokens: int = 128) -> None:
        allowed = "an integer of at least 0 (tokens)"
        require(type(threshold_tokens) is int and threshold_tokens >= 0, self, "threshold_tokens", threshold_tokens, allowed)
        require(type(next_prompt_tokens) is int and next_prompt_tokens >= 0, self, "next_prompt_tokens", next_prompt_tokens, allowed)
        self.threshold_tokens = threshold_tokens
        self.next_prompt_tokens = next_prompt_tokens
        super().__init__()

    def reset(self) -> None:
        """As new."""
        super().reset()
        self._blocks: dict[bytes, BlockView] = {}  # in the cache
        self._length: dict[bytes, int] = {}  # content in the cache -> blocks of the longest conversation through it

    def key(self, block: BlockView) -> tuple[float, ...]:
        """(would its conversation be too slow, tick of its last use)."""
        num_uncached = (self._length[block.content] - block.depth) * block.num_tokens + self.next_prompt_tokens
        return (num_uncached > self.threshold_tokens, block.used_tick)

    def insert(self, block: BlockView, now: Now) -> None:
        """As far as one knows, its conversation ends here."""
        self._blocks[block.content] = block
        self._length[block.content] = block.depth + 1

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """A candidate; the block before it, as a rule let go next, is in a conversation at least as long."""
        super().release(block, now, preempted)
        length, content = self._length[block.content], block.parent
        while content is not None and self._length.get(content, length) < length:
            before = self._blocks[content]
            is_candidate = before.block_id in self._live
            if is_candidate and self.key(before)[0]:
                return  # spared already, as all before it
            self._length[content] = length
            if not is_candidate:
                return  # tells it on when it is let go
            super().release(before, now, preempted)
            content = before.parent

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone."""
        super().evict(block, now)
        del self._blocks[block.content], self._length[block.content]
