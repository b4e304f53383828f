"""Queue-informed."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import EvictionPolicy, require
from kvlab.policies.eviction._heap import KeyHeap
from kvlab.policies.eviction._wrapping import Wrapping
from kvlab.types import BlockView, Now


class QueueInformed(Wrapping):
    """Blocks that a waiting request will hit are spared; the inner policy chooses among the rest. When there is no rest, the block goes
    whose request waits farthest back, deepest first.

    Source: the near future that a serving queue knows, used as in Belady's MIN; SGLang (NeurIPS 2024) and Mooncake (FAST 2025) use the
        same knowledge to order requests and to fetch blocks ahead.
    Parameters: inner: the policy that chooses among the rest (None: lru). num_waiting: waiting requests that are looked at, from the
        head of the queue, at least 1.
    Deviations: spared is what is in a prompt, also behind a gap. The inner policy takes a block for held while it is spared; one that was
        a candidate before is taken from it as a hit would (policies with lists of their own may count that as a use, those that sort by
        a key do not). In a replay that asks per access nobody waits, and the
        inner policy decides alone; one of semantics `engine` tells it of the requests that come next, as if they waited.
    """

    def __init__(self, inner: EvictionPolicy | None = None, num_waiting: int = 8) -> None:
        super().__init__(inner)
        require(type(num_waiting) is int and num_waiting >= 1, self, "num_waiting", num_waiting, "an integer of at least 1 (requests)")
        self.num_waiting = num_waiting
        self.queue_depth = max(num_waiting, self.queue_depth)
        self._make_empty()

    def reset(self) -> None:
        """As new."""
        super().reset()
        self._make_empty()

    def _make_empty(self) -> None:
        self._needed: list[list[bytes]] = []  # what the waiting requests will look for, as last heard
        self._rank: dict[bytes, int] = {}  # content that a waiting request will look for -> its place among these, soonest first
        self._offered: dict[int, BlockView] = {}  # candidates that the inner policy knows of
        self._spared: dict[int, BlockView] = {}  # candidates that are kept from it
        self._last = KeyHeap()  # the spared ones, latest need first

    def waiting(self, prefixes: Sequence[Sequence[bytes]], now: Now) -> None:
        """Spare what these will hit, and no longer what they will not."""
        super().waiting(prefixes, now)
        needed = [list(keys) for keys in prefixes[: self.num_waiting]]
        if needed == self._needed:
            return
        self._needed, self._rank = needed, {}
        for keys in needed:
            for key in keys:
                self._rank.setdefault(key, len(self._rank))
        spared, self._spared, self._last = self._spared, {}, KeyHeap()
        for block in spared.values():
            if block.content in self._rank:
                self._spare(block)
            else:
                self._offer(block, now)

    def _spare(self, block: BlockView) -> None:
        self._spared[block.block_id] = block
        self._last.push(block.block_id, (-self._rank[block.content],))

    def _offer(self, block: BlockView, now: Now, preempted: bool = False) -> None:
        self._offered[block.block_id] = block
        self._inner.release(block, now, preempted)

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """A candidate: spared, or the inner policy's."""
        if block.content in self._rank:
            self._spare(block)
        else:
            self._offer(block, now, preempted)

    def hit(self, block: BlockView, now: Now) -> None:
        """Held."""
        super().hit(block, now)
        self._drop(block)

    def withhold(self, block: BlockView, now: Now) -> None:
        """No candidate."""
        if block.block_id in self._offered:
            self._inner.withhold(block, now)
        self._drop(block)

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone."""
        self._drop(block)
        super().evict(block, now)

    def _drop(self, block: BlockView) -> None:
        self._offered.pop(block.block_id, None)
        if self._spared.pop(block.block_id, None) is not None:
            self._last.drop(block.block_id)

    def victim(self, now: Now) -> int:
        """The inner policy's choice, asked again while that is to be spared; at last the one needed latest."""
        while len(self._offered) > self._inner.num_pinned:
            block_id = self._inner.victim(now)
            block = self._offered[block_id]
            if block.content not in self._rank:
                return block_id
            del self._offered[block_id]
            self._inner.withhold(block, now)
            self._spare(block)
        return self._last.first()
