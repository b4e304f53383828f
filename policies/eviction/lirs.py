"""LIRS: low inter-reference recency set."""

from __future__ import annotations

from collections import OrderedDict

from kvlab.policies.base import EvictionPolicy, is_number, require
from kvlab.types import BlockView, Now

GONE = -1
"""In the stack: remembered, but not in the cache."""


class Lirs(EvictionPolicy):
    """Blocks whose last two uses lay close together (LIR) have nearly all of the pool; the others (HIR) pass through a short queue, and
    become LIR when they are used again while the stack still remembers them.

    Source: Jiang and Zhang, "LIRS: an efficient low inter-reference recency set replacement policy to improve buffer cache performance"
        (SIGMETRICS 2002), https://doi.org/10.1145/511334.511340
    Parameters: hir: share of the pool for HIR blocks (at least one), in (0, 1). ghosts: blocks that are gone and remembered in the
        stack, as a share of the pool's blocks, at least 0.
    Deviations: the paper's stack has no limit; here the contents that went first are forgotten first. Being let go is a use, as in
        lru. When no HIR block is a candidate, the LIR block used longest ago goes; a held LIR block is not demoted.
    """

    def __init__(self, hir: float = 0.01, ghosts: float = 2.0) -> None:
        require(is_number(hir) and 0 < hir < 1, self, "hir", hir, "a share in (0, 1)")
        require(is_number(ghosts) and 0 <= ghosts < 1e9, self, "ghosts", ghosts, "a number of at least 0")
        self.hir = hir
        self.ghosts = ghosts
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.bind(0)

    def bind(self, num_blocks: int) -> None:
        """Sizes of the sets."""
        self._lir_capacity = num_blocks - max(1, int(self.hir * num_blocks))
        self._ghost_capacity = int(self.ghosts * num_blocks)
        self._stack: OrderedDict[bytes, int] = OrderedDict()  # content -> block id or GONE, bottom (least recently used) first
        self._gone: OrderedDict[bytes, None] = OrderedDict()  # contents in the stack that are GONE, in the order they went
        self._is_lir: dict[int, bool] = {}  # of all blocks in the cache
        self._num_lir = 0
        self._lir: OrderedDict[int, bytes] = OrderedDict()  # LIR candidates and their contents, least recently used first
        self._queue: OrderedDict[int, None] = OrderedDict()  # HIR candidates, next to go first

    def insert(self, block: BlockView, now: Now) -> None:
        """LIR if the stack remembers it or there is room among the LIR blocks, else HIR."""
        remembered = block.content in self._gone
        if remembered:
            del self._gone[block.content]
        self._is_lir[block.block_id] = False
        self._to_top(block)
        if remembered or self._num_lir < self._lir_capacity:
            self._promote(block.block_id)
        while len(self._gone) > self._ghost_capacity:
            del self._stack[self._gone.popitem(last=False)[0]]
        self._prune()

    def hit(self, block: BlockView, now: Now) -> None:
        """To the top of the stack; a HIR block that was in the stack becomes LIR."""
        block_id = block.block_id
        if self._is_lir[block_id]:
            self._lir.pop(block_id, None)
            self._to_top(block)
        else:
            self._queue.pop(block_id, None)
            again = block.content in self._stack
            self._to_top(block)
            if again:
                self._promote(block_id)
        self._prune()

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """A candidate, at the top of the stack; if HIR, at the end of the queue."""
        self._to_top(block)
        if self._is_lir[block.block_id]:
            self._lir[block.block_id] = block.content
            self._demote()
        else:
            self._queue[block.block_id] = None
        self._prune()

    def victim(self, now: Now) -> int:
        """The HIR block that has been in the queue longest."""
        return next(iter(self._queue or self._lir))

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone; remembered if it is still in the stack, as a HIR block."""
        block_id, content = block.block_id, block.content
        if self._is_lir.pop(block_id):
            self._num_lir -= 1
            self._lir.pop(block_id, None)
            self._stack.pop(content, None)
            self._prune()
        else:
            self._queue.pop(block_id, None)
            if content in self._stack:
                self._stack[content] = GONE
                self._gone[content] = None

    def _to_top(self, block: BlockView) -> None:
        self._stack[block.content] = block.block_id
        self._stack.move_to_end(block.content)

    def _promote(self, block_id: int) -> None:
        """To LIR, at another's cost if there are too many."""
        self._is_lir[block_id] = True
        self._num_lir += 1
        self._demote()

    def _demote(self) -> None:
        """While there are too many LIR blocks, the one at the bottom becomes HIR."""
        while self._num_lir > self._lir_capacity and self._lir:
            block_id, content = self._lir.popitem(last=False)
            self._is_lir[block_id] = False
            self._num_lir -= 1
            del self._stack[content]
            self._queue[block_id] = None

    def _prune(self) -> None:
        """A LIR block is at the bottom of the stack: what lies below the lowest is no longer remembered."""
        stack, is_lir = self._stack, self._is_lir
        while stack:
            content, block_id = next(iter(stack.items()))
            if block_id != GONE and is_lir[block_id]:
                return
            del stack[content]
            if block_id == GONE:
                del self._gone[content]
