"""`BlockPool`: the one owner of a tier's blocks: reference counts, free blocks and the content map.

    free        nothing in it, on nobody's table
    used        ref_count >= 1: held by that many tables
    evictable   published, ref_count 0: still findable by content, may be evicted        free + used + evictable = num_blocks

A block that the eviction policy has pinned counts as used, though no table holds it: it is not there for an allocation.
Failure to allocate is a value (None) and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

from kvlab.cache.free_blocks import FreeBlocks, check_placed
from kvlab.policies.base import EvictionPolicy, LayoutPolicy
from kvlab.policies.layout import Paged
from kvlab.types import IllegalDecision, Now, UserError

MAX_BLOCKS = 2**25
"""Blocks that a pool may have: each has a record of some 250 bytes (8 GB)."""


class CachedBlock:
    """One physical block's record; what policies see as `BlockView`. `content` is empty while it is not published."""

    __slots__ = ("block_id", "content", "counted_tick", "depth", "inserted_s", "inserted_tick", "num_hits", "num_tokens", "parent",
                 "ref_count", "used_s", "used_tick")  # fmt: skip

    def __init__(self, block_id: int, num_tokens: int) -> None:
        self.block_id = block_id
        self.num_tokens = num_tokens
        self.ref_count = 0
        self.content = b""
        self.parent: bytes | None = None
        self.depth = 0
        self.num_hits = 0
        self.inserted_tick = self.counted_tick = self.used_tick = 0
        self.inserted_s = self.used_s = 0.0


class BlockPool:
    """Blocks of one tier.

    Args:
        tier: "gpu" or "cpu". num_blocks: blocks in it (cpu: may be 0). block_size: tokens per block.
        eviction: asked which published, unheld block goes; None where nothing is ever published.
        layout: asked where new blocks lie.
        on_event: called as (kind, block) on every change, when somebody listens (see `BlockEvent`).
    """

    def __init__(self, tier: str, num_blocks: int, block_size: int, eviction: EvictionPolicy | None, layout: LayoutPolicy,
                 on_event: Callable[[str, str, CachedBlock], None] | None = None) -> None:  # fmt: skip
        if num_blocks > MAX_BLOCKS:
            raise UserError(f"{num_blocks} blocks are not allowed in a pool: {MAX_BLOCKS:,} at most. Take fewer or larger blocks.")
        self.tier = tier
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.eviction = eviction
        self.layout = layout
        self.on_event = on_event
        self.blocks = [CachedBlock(block_id, block_size) for block_id in range(num_blocks)]
        self.free = FreeBlocks(num_blocks)
        self._num_unheld = 0  # published or kept in a slot, ref_count 0
        self.num_evicted = 0
        self.by_content: dict[bytes, CachedBlock] = {}
        self.tick = 0
        self.now = Now(0, 0.0)
        self.on_forget: Callable[[bytes], None] | None = None
        self._took = layout.took if type(layout).took is not LayoutPolicy.took else None
        self._gave = layout.gave if type(layout).gave is not LayoutPolicy.gave else None
        self._takes_lowest = type(layout) is Paged and on_event is None  # nobody to ask or to tell: what Paged.place does
        if eviction is not None:
            eviction.bind(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks with nothing in them."""
        return len(self.free)

    @property
    def num_pinned(self) -> int:
        """Blocks that no table holds and that the eviction policy will not give up for now."""
        return self.eviction.num_pinned if self.eviction is not None else 0

    @property
    def num_evictable(self) -> int:
        """Published blocks that no table holds and that may be evicted."""
        return self._num_unheld - self.num_pinned

    @property
    def num_held(self) -> int:
        """Blocks held by at least one table."""
        return self.num_blocks - len(self.free) - self._num_unheld

    @property
    def num_used(self) -> int:
        """Blocks held by at least one table, or pinned."""
        return self.num_held + self.num_pinned

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could have: free and evictable."""
        return len(self.free) + self.num_evictable

    def num_evictable_of(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are evictable."""
        unheld = [b for b in block_ids if self.blocks[b].ref_count == 0 and b not in self.free]
        if self.num_pinned:
            assert self.eviction is not None
            return sum(not self.eviction.is_pinned(b) for b in unheld)
        return len(unheld)

    def give_up_pins(self) -> bool:
        """Ask the eviction policy for its pins, so that they become evictable: some request would end without them. False: it has none."""
        return bool(self.num_pinned and self.eviction is not None and self.eviction.give_up_pins(self.now))

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks, each with ref_count 1; None (and nothing changed) when there are not so many.

        Free blocks are used before anything is evicted; no more is evicted than is missing.
        """
        if self._takes_lowest and num_blocks <= len(self.free):
            taken, blocks = self.free.take_lowest(num_blocks), self.blocks
            for block_id in taken:
                blocks[block_id].ref_count = 1
            return taken
        if num_blocks > len(self.free) + self.num_evictable:
            return None
        while len(self.free) < num_blocks:
            self._evict_one()
        block_ids = self.layout.place(num_blocks, self.free)
        if block_ids is None and not self.layout.shares_blocks:
            return None  # nothing was evicted: without sharing nothing is published
        if block_ids is None:
            raise IllegalDecision("layout", self.layout, f"no place for {num_blocks} of {len(self.free)} free blocks",
                                  "a place wherever there are enough, for a layout that shares blocks")  # fmt: skip
        check_placed(self.layout, block_ids, num_blocks, self.free)
        self.take(block_ids)
        return block_ids

    def take(self, block_ids: list[int]) -> None:
        """Free blocks are held by a table from now on."""
        self.free.take(block_ids)
        for block_id in block_ids:
            block = self.blocks[block_id]
            block.ref_count = 1
            if self.on_event:
                self.on_event("allocate", self.tier, block)
        if self._took is not None:
            self._took(block_ids)

    def _give(self, block: CachedBlock) -> None:
        self.free.give(block.block_id)
        if self._gave is not None:
            self._gave(block.block_id)

    # ------------------------------------------------ blocks that a layout's slots keep

    def keep(self, block_ids: Iterable[int]) -> None:
        """A table lets go of blocks whose content its slot keeps: no longer used, and not free."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            assert block.ref_count == 1 and not block.content  # noqa: PT018
            block.ref_count = 0
            self._num_unheld += 1
            if self.on_event:
                self.on_event("release", self.tier, block)

    def reuse(self, block_ids: Iterable[int]) -> None:
        """A table takes over kept blocks."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            block.ref_count = 1
            self._num_unheld -= 1
            if self.on_event:
                self.on_event("hit", self.tier, block)

    def drop(self, block_ids: Iterable[int]) -> None:
        """Kept blocks are free again; counted as evicted."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            self._num_unheld -= 1
            self.num_evicted += 1
            self._give(block)
            if self.on_event:
                self.on_event("evict", self.tier, block)

    # ------------------------------------------------------------ sharing, content

    def share(self, block_id: int) -> None:
        """One more table holds a block that is held already (a fork)."""
        block = self.blocks[block_id]
        block.ref_count += 1
        if self.on_event:
            self.on_event("share", self.tier, block)

    def adopt(self, block_id: int) -> None:
        """A table takes hold of a cached block in place of its own with the same content. Nothing was saved, so it is no hit."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            assert self.eviction is not None
            self._num_unheld -= 1
            self.eviction.withhold(block, self.now)
        block.ref_count += 1
        if self.on_event:
            self.on_event("share", self.tier, block)

    def find(self, content: bytes) -> int | None:
        """Block that holds `content`, or None."""
        block = self.by_content.get(content)
        return None if block is None else block.block_id

    def hit(self, block_ids: Iterable[int]) -> None:
        """A table takes hold of published blocks found by content, head to tail."""
        assert self.eviction is not None
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                self._num_unheld -= 1
            block.ref_count += 1
            block.num_hits += 1
            self.tick += 1
            block.counted_tick = block.used_tick = self.tick
            block.used_s = self.now.now_s
            self.eviction.hit(block, self.now)
            if self.on_event:
                self.on_event("hit", self.tier, block)

    def release(self, block_ids: Iterable[int], preempted: bool = False) -> None:
        """A table lets go of blocks; give them tail first, so that a prefix outlives its continuation."""
        given: list[int] = []  # free again, where nobody asks one by one
        tells, blocks = self.on_event is not None or self._gave is not None, self.blocks
        for block_id in block_ids:
            block = blocks[block_id]
            if block.ref_count == 1 and not block.content and not tells:  # most of them
                block.ref_count = 0
                given.append(block_id)
                continue
            assert block.ref_count > 0, f"block {block_id} of tier {self.tier} released more often than held"
            block.ref_count -= 1
            if block.ref_count:
                if self.on_event:
                    self.on_event("unshare", self.tier, block)
                continue
            if not block.content:
                self._give(block)
                if self.on_event:
                    self.on_event("free", self.tier, block)
                continue
            assert self.eviction is not None
            self._num_unheld += 1
            self.tick += 1
            block.used_tick = self.tick
            block.used_s = self.now.now_s
            self.eviction.release(block, self.now, preempted)
            if self.on_event:
                self.on_event("release", self.tier, block)
        if given:
            self.free.give_all(given)

    def publish(self, block_id: int, content: bytes, parent: bytes | None, depth: int) -> bool:
        """Make a held, full block findable. False when its content is there already: duplicate content keeps the first block."""
        if content in self.by_content:
            return False
        assert self.eviction is not None
        block = self.blocks[block_id]
        assert not block.content
        assert block.ref_count > 0
        self.tick += 1
        block.content, block.parent, block.depth, block.num_hits = content, parent, depth, 0
        block.inserted_tick = block.counted_tick = block.used_tick = self.tick
        block.inserted_s = block.used_s = self.now.now_s
        self.by_content[content] = block
        self.eviction.insert(block, self.now)
        if self.on_event:
            self.on_event("publish", self.tier, block)
        return True

    def _evict_one(self) -> None:
        assert self.eviction is not None
        block_id = self.eviction.victim(self.now)
        block = self.blocks[block_id] if isinstance(block_id, int) and 0 <= block_id < self.num_blocks else None
        if block is None or not block.content or block.ref_count:
            state = "no block of the pool" if block is None else ("held" if block.ref_count else "not cached")
            raise IllegalDecision("eviction", self.eviction, f"evict block {block_id!r}, which is {state}",
                                  f"one of the {self.num_evictable} cached blocks that no table holds")  # fmt: skip
        self._forget(block)
        self.num_evicted += 1

    def _forget(self, block: CachedBlock) -> None:
        assert self.eviction is not None
        assert block.content
        self.eviction.evict(block, self.now)
        if self.on_event:
            self.on_event("evict", self.tier, block)
        if self.on_forget:
            self.on_forget(block.content)
        del self.by_content[block.content]
        block.content, block.parent = b"", None
        self._num_unheld -= 1
        self._give(block)

    def reset_cache(self) -> bool:
        """Forget all cached content. False, and nothing changed, while some table holds a block."""
        if self.num_held:
            return False
        for block in sorted(self.by_content.values(), key=attrgetter("block_id")):
            self._forget(block)
        return True
