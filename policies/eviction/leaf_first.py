"""Leaves first: a constraint on any other policy."""

from __future__ import annotations

from collections import OrderedDict

from kvlab.policies.base import EvictionPolicy, KeyEviction
from kvlab.policies.eviction._wrapping import Wrapping
from kvlab.types import BlockView, Now


class LeafFirst(Wrapping):
    """Only a leaf goes, a block that no other candidate continues, so that nothing stays in the cache that cannot be found. Which leaf,
    the inner policy says.

    Source: SGLang's RadixAttention (Zheng et al., "SGLang: efficient execution of structured language model programs", NeurIPS 2024,
        https://arxiv.org/abs/2312.07104), which evicts the leaves of its tree, least recently used first.
    Parameters: inner: the policy that chooses (None: lru).
    Deviations: an inner policy that sorts by a key (lru, fifo, lfu, mru, filo, gdsf, length_aware, belady ...) knows of the leaves only
        and takes the best of them, exactly. Another one is asked for its choice among all candidates, and where others continue that,
        the way goes down from child to child, each time the one let go longest ago (O(depth)). A child that is held or pinned protects
        no parent: requests hold their blocks from the head on, so that happens with duplicates of content only, and with pins. In a
        classic cache simulation (a replay's semantics `access`) ids may continue each other in a circle, 1 after 2 and 2 after 1: where
        no leaf is left, the candidate let go longest ago is taken for one.
    """

    def __init__(self, inner: EvictionPolicy | None = None) -> None:
        super().__init__(inner)
        self._sorts = isinstance(self._inner, KeyEviction)
        self._make_empty()

    def reset(self) -> None:
        """As new."""
        super().reset()
        self._make_empty()

    def _make_empty(self) -> None:
        self._candidates: dict[bytes, BlockView] = {}  # by content
        self._contents: dict[int, bytes] = {}  # of the candidates, by block id
        self._num_leaves = 0  # known to an inner policy that sorts
        self._children: dict[bytes, OrderedDict[int, BlockView]] = {}  # content -> candidates that continue it, let go longest ago first
        self._choice = self._above = b""  # what the inner policy last chose; what is above the leaf that this led to

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """A candidate, and a leaf unless candidates continue it; what it continues is no leaf any more."""
        content, parent = block.content, block.parent
        self._candidates[content] = block
        self._contents[block.block_id] = content
        if not self._sorts or content not in self._children:
            self._inner.release(block, now, preempted)
            self._num_leaves += 1
        if parent is None:
            return
        siblings = self._children.get(parent)
        if siblings is not None:
            siblings[block.block_id] = block
            return
        self._children[parent] = OrderedDict({block.block_id: block})
        if self._sorts and parent in self._candidates:
            self._inner.withhold(self._candidates[parent], now)
            self._num_leaves -= 1

    def hit(self, block: BlockView, now: Now) -> None:
        """Held: no candidate."""
        super().hit(block, now)
        self._drop(block, now)

    def withhold(self, block: BlockView, now: Now) -> None:
        """No candidate."""
        super().withhold(block, now)
        self._drop(block, now)

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone."""
        super().evict(block, now)
        self._drop(block, now)

    def _drop(self, block: BlockView, now: Now) -> None:
        """No candidate any more; what it alone continued is a leaf now."""
        if self._contents.pop(block.block_id, None) is None:
            return  # held by others already
        del self._candidates[block.content]
        self._num_leaves -= block.content not in self._children
        if block.parent is None:
            return
        siblings = self._children[block.parent]
        del siblings[block.block_id]
        if siblings:
            return
        del self._children[block.parent]
        if self._sorts and block.parent in self._candidates:
            self._inner.release(self._candidates[block.parent], now, False)
            self._num_leaves += 1

    def victim(self, now: Now) -> int:
        """The inner policy's choice, or a leaf below it."""
        if self._sorts and not self._num_leaves:
            return next(iter(self._candidates.values())).block_id
        block_id = self._inner.victim(now)
        if self._sorts:
            return block_id
        choice = content = self._contents[block_id]
        if choice == self._choice and self._above in self._candidates:  # go on where the last way down ended
            content = self._above
        seen = {content}
        while (child := self._child(content)) is not None:
            if child.content in seen:
                content = next(iter(self._candidates))
                break
            content = child.content
            seen.add(content)
        leaf = self._candidates[content]
        self._choice, self._above = choice, (leaf.parent or b"") if content != choice else b""
        return leaf.block_id

    def _child(self, content: bytes) -> BlockView | None:
        """The candidate that continues it, the one let go longest ago; None: there is none."""
        children = self._children.get(content)
        if children is None:
            return None
        if not self._inner.num_pinned:
            return next(iter(children.values()))
        return next((child for child in children.values() if not self._inner.is_pinned(child.block_id)), None)
