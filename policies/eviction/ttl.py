"""Time to live (Continuum)."""

from __future__ import annotations

from kvlab.policies.base import EvictionPolicy, is_number, require
from kvlab.policies.eviction._heap import KeyHeap
from kvlab.types import BlockView, Now


class Ttl(EvictionPolicy):
    """What belongs to a conversation that comes back, as an agent does after each tool call, is kept for a time to live after its last
    use; everything else has expired when it is let go. Expired blocks go first, in the order in which they expired, then the others,
    least recently used first.

    Source: Li et al., "Continuum: efficient and robust multi-turn LLM agent scheduling with KV cache time-to-live" (2025),
        https://arxiv.org/abs/2511.02230
    Parameters: ttl_s: time to live (s) of a conversation that came back, above 0. new_ttl_s: of one that has not yet, at least 0.
    Deviations: Continuum reads from a turn's output whether a tool will be called, and fits the time to live to that tool's durations
        and to what a reload would cost. A block does not show its request, so a conversation is known by its past: it came back if its
        block was hit, or if the block continues one that was hit and that nothing else in the cache continues (else it is a new branch
        of a shared prefix), or if it continues a block of such a kind. The time to live is one number. Where Continuum's scheduler
        waits until a pin expires, here the least recently used goes when all are alive.
    """

    def __init__(self, ttl_s: float = 60.0, new_ttl_s: float = 0.0) -> None:
        require(is_number(ttl_s) and ttl_s > 0, self, "ttl_s", ttl_s, "a number above 0 (s)")
        require(is_number(new_ttl_s) and new_ttl_s >= 0, self, "new_ttl_s", new_ttl_s, "a number of at least 0 (s)")
        self.ttl_s = ttl_s
        self.new_ttl_s = new_ttl_s
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._blocks: dict[bytes, BlockView] = {}  # in the cache
        self._num_children: dict[bytes, int] = {}  # content -> blocks in the cache that continue it
        self._returned: set[bytes] = set()  # contents that continue a conversation which came back
        self._by_expiry = KeyHeap()  # all candidates
        self._by_use = KeyHeap()

    def insert(self, block: BlockView, now: Now) -> None:
        """Note whether it goes on with a conversation."""
        self._blocks[block.content] = block
        if block.parent is None:
            return
        num_siblings = self._num_children.get(block.parent, 0)
        self._num_children[block.parent] = num_siblings + 1
        parent = self._blocks.get(block.parent)
        if parent is not None and (block.parent in self._returned or (parent.num_hits and not num_siblings)):
            self._returned.add(block.content)

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """Its time begins."""
        ttl_s = self.ttl_s if block.num_hits or block.content in self._returned else self.new_ttl_s
        self._by_expiry.push(block.block_id, (block.used_s + ttl_s, block.used_tick))
        self._by_use.push(block.block_id, (block.used_tick,))

    def hit(self, block: BlockView, now: Now) -> None:
        """Held."""
        self._drop(block)

    def withhold(self, block: BlockView, now: Now) -> None:
        """No candidate."""
        self._drop(block)

    def _drop(self, block: BlockView) -> None:
        self._by_expiry.drop(block.block_id)
        self._by_use.drop(block.block_id)

    def victim(self, now: Now) -> int:
        """The one that expired first, if any has, else the one used longest ago."""
        (expiry_s, _), block_id = self._by_expiry.first_entry()
        return block_id if expiry_s <= now.now_s else self._by_use.first()

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone."""
        self._drop(block)
        del self._blocks[block.content]
        self._returned.discard(block.content)
        if block.parent is not None:
            self._num_children[block.parent] -= 1
            if not self._num_children[block.parent]:
                del self._num_children[block.parent]
