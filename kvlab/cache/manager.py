"""`KVCacheManager`: block tables over the pools. What vLLM calls the block space manager. Swap is `kvlab.cache.swap`.

A table maps a sequence's slots to blocks. Slots are counted from the first kept token, positions from the first token:

    positions   0 ......... dropped*B | ............ num_computed | ...... capacity
    slots       (given up)            | 0 .. written ............ | free slots of the table's last blocks
    block_ids                         | [0] [1] [2] ...                        [-1]

Where a compression policy keeps sinks, their blocks stand before the dropped ones, and slots are counted through:

    positions   0 .... head*B | .......... (head + dropped)*B | ............ num_computed | ...... capacity
    slots       0 ........... | (given up)                    | head*B ..... written .... |
    block_ids   [0] .. [head-1]                               | [head] ...                      [-1]

Every question "would it fit" is asked before anything is taken; failure is a value and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvlab.cache.parking import Parking
from kvlab.cache.pool import BlockPool, CachedBlock
from kvlab.cache.prefix import PrefixCache, PrefixMatch
from kvlab.cache.regions import Regions
from kvlab.cache.swap import Swapper
from kvlab.cache.table import BlockTable, Group, Seq, Work
from kvlab.policies.base import CompressionPolicy, EvictionPolicy, FreeView, LayoutPolicy, PrefixCachePolicy, RegionNeed
from kvlab.policies.eviction.leaf_first import LeafFirst
from kvlab.policies.layout import Paged
from kvlab.types import BlockCopy, IllegalDecision, Now


class KVCacheManager:
    """Tables, sharing, copy-on-write, publication, swap.

    Args:
        num_blocks, num_cpu_blocks, block_size: sizes of the pools.
        eviction, prefix_cache, layout, compression: the policies asked.
        max_model_len: tokens a sequence may reach (a layout may reserve for them).
        track_shareable: count tokens that were cached but lost to block granularity.
        on_event: called as (kind, tier, block) on block events, when somebody listens.
        depth: steps that may be in flight while the next is planned; what they touch is not reused (see `kvlab.cache.parking`).
    """

    def __init__(self, num_blocks: int, num_cpu_blocks: int, block_size: int, eviction: EvictionPolicy,
                 prefix_cache: PrefixCachePolicy, layout: LayoutPolicy, compression: CompressionPolicy, max_model_len: int,
                 track_shareable: bool = True, on_event: Callable[[str, str, CachedBlock], None] | None = None,
                 depth: int = 0) -> None:  # fmt: skip
        self.block_size = block_size
        self.depth = depth
        self.layout = layout
        self.prefix_cache = prefix_cache
        self.compression = compression
        self._num_head_blocks = -(-compression.num_sink_tokens // block_size)
        self.max_model_len = max_model_len
        if prefix_cache.enabled and prefix_cache.token_tree and not isinstance(eviction, LeafFirst):
            eviction = LeafFirst(eviction)  # a path is cached from its head on, or it can't be found
        self.pool = BlockPool("gpu", num_blocks, block_size, eviction, layout, on_event)
        self.cpu_pool = BlockPool("cpu", num_cpu_blocks, block_size, None, _AnyPlace(), on_event)
        self.pending_copies: list[tuple[int, int, int]] = []  # (seq_id, source, destination)
        self.cause = ""
        """Request on whose behalf blocks change just now, for block events."""
        self._on_event = on_event
        self.num_relocated = 0
        """Blocks copied so far because a sequence had outgrown its region."""
        self.regions = None if layout.shares_blocks else Regions(self)
        """Where blocks aren't shared."""
        self.swapper = Swapper(self)
        self.parking = Parking(self)
        self.prefixes = PrefixCache(prefix_cache, self.pool, track_shareable, self.let_go)

    def set_now(self, now: Now) -> None:
        """The step and time that policies will see."""
        self.pool.now = self.cpu_pool.now = now

    def tell(self, kind: str, pool: BlockPool, block_ids: Iterable[int]) -> None:
        """Block events, where somebody listens."""
        if self._on_event is not None:
            for block_id in block_ids:
                self._on_event(kind, pool.tier, pool.blocks[block_id])

    def num_blocks_for(self, num_tokens: int) -> int:
        """ceil(num_tokens / block size)."""
        return -(-num_tokens // self.block_size)

    # ----------------------------------------------------------- prefix cache

    def match_prefix(self, seq: Seq, num_tokens: int) -> PrefixMatch:
        """What is cached of the first `num_tokens` tokens of `seq`; changes nothing."""
        return self.prefixes.match(seq, num_tokens) if self.regions is None else self.regions.find_kept(seq, num_tokens)

    def find_prefix(self, seq: Seq, num_tokens: int) -> list[int]:
        """Cached blocks of the longest contiguous prefix of `seq`: full blocks only, at most `num_tokens` tokens."""
        return self.match_prefix(seq, num_tokens).block_ids

    def prefix_keys(self, seq: Seq) -> list[bytes]:
        """Content keys of the full blocks up to the last token but one; empty without a prefix cache."""
        return self.prefixes.keys(seq)

    def num_shareable_lost(self, seq: Seq, match: PrefixMatch) -> int:
        """Tokens after a match that some cached block also holds, in a block that does not match as a whole."""
        return self.prefixes.num_shareable_lost(seq, match)

    def publish(self, seq: Seq) -> None:
        """Offer every block of `seq` that is full of computed, accepted tokens. Called after a commit."""
        assert seq.table is not None
        self.cause = seq.group.request_id
        self.prefixes.publish(seq, seq.table)

    # ------------------------------------------------------------- entry, growth

    def region_blocks(self, seq: Seq, num_tokens: int) -> int:
        """Blocks the layout takes for a sequence that must hold `num_tokens` now."""
        group = seq.group
        return self.layout.reserve_blocks(RegionNeed(self.num_blocks_for(num_tokens), group.num_prompt_tokens, group.max_tokens,
                                                     group.oracle_output_len, self.max_model_len, self.block_size))  # fmt: skip

    def num_available(self, hits: Sequence[int]) -> int:
        """free + evictable blocks other than `hits`."""
        return self.pool.num_available - self.pool.num_evictable_of(hits)

    def can_enter(self, group: Group, hits: list[int], num_tokens: int) -> bool:
        """Whether `enter` would succeed."""
        if self.regions is not None:
            return self.regions.find(group, hits, [(group.seqs[0], num_tokens)]) is not None
        return self.num_blocks_for(num_tokens) - len(hits) <= self.num_available(hits)

    def why_not(self, group: Group, hits: list[int], work: Work) -> str:
        """What keeps a group out that can't enter (or come back) with this work: "blocks", "fragmentation", "slots"."""
        return "blocks" if self.regions is None else self.regions.why_not(group, hits, work)

    def enter(self, group: Group, hits: list[int], num_tokens: int, source: int = -1, num_cached: int = -1) -> bool:
        """Give the group's first sequence a table that begins with `hits` and covers `num_tokens`. False: no room, nothing changed.

        With a `source`, the block after the hits begins as a copy of it, and `num_cached` tokens count as computed."""
        if self.regions is not None:
            return self.regions.enter(group, hits, num_tokens, num_cached)
        if not self.can_enter(group, hits, num_tokens):
            return False
        seq = group.seqs[0]
        self.cause = group.request_id
        self.pool.hit(hits)
        held = self._hold_source(source, self.num_blocks_for(num_tokens) - len(hits))
        new = self.pool.allocate(self.num_blocks_for(num_tokens) - len(hits))
        assert new is not None, "counted before"
        self.let_go_read(held)
        seq.table = BlockTable(hits + new, self.block_size)
        seq.num_computed = len(hits) * self.block_size if source < 0 else num_cached
        seq.table.num_full = len(hits)
        if len(seq.keys) < len(hits):  # found by its tokens: the blocks know their names
            seq.keys = [self.pool.blocks[block_id].content for block_id in hits]
        if source >= 0 and new[0] != source:
            self.pending_copies.append((seq.seq_id, source, new[0]))
            self.tell("copy", self.pool, new[:1])
        return True

    def _hold_source(self, source: int, num_new: int) -> tuple[int, ...]:
        """Take hold of a block to copy from while `num_new` blocks are allocated, so that these don't evict it.

        Where every other candidate is needed it goes too, and may become one of the new blocks: its tokens stay in it until the step's
        copies have run, as nothing is written before. So a copy never takes room that the request would not have needed anyhow."""
        if source < 0 or num_new > self.pool.num_available - self.pool.num_evictable_of((source,)):
            return ()
        self.pool.hit((source,))
        return (source,)

    def _shared_write_block(self, seq: Seq, gone: dict[int, int]) -> int:
        """Block that `seq` writes next, if others hold it too or may find it (a copy is needed); else -1.

        A sequence that branched off inside a block which its parent has filled meanwhile holds a published block alone once the
        parent has ended: writing there would change what the cache says."""
        table = seq.table
        assert table is not None
        i = seq.num_computed // self.block_size - table.num_dropped_blocks
        if i >= len(table.block_ids):
            return -1
        block = self.pool.blocks[table.block_ids[i]]
        is_needed = block.content or block.ref_count - gone.get(block.block_id, 0) > 1
        return block.block_id if is_needed else -1

    def num_to_grow(self, work: Work) -> int:
        """New blocks that `grow(work)` takes (at most, with regions): missing ones and copies of shared blocks about to be written."""
        if self.regions is not None:
            return self.regions.num_to_grow(work)
        need, gone = 0, dict[int, int]()
        for seq, num_tokens in work:
            table = seq.table
            assert table is not None
            if num_tokens > table.capacity:
                need += -(-(num_tokens - table.capacity) // self.block_size)
            if table.tail_shared and (block_id := self._shared_write_block(seq, gone)) >= 0:
                gone[block_id] = gone.get(block_id, 0) + 1
                need += 1
        return need

    def can_grow(self, work: Work) -> bool:
        """Whether `grow(work)` would succeed."""
        if self.regions is not None:
            return self.regions.find_growth(work) is not None
        return self.num_to_grow(work) <= self.pool.num_available

    def grow(self, work: Work) -> bool:
        """Make each table cover its tokens and own the block it writes. All or nothing."""
        if self.regions is not None:
            return self.regions.grow(work)
        if not self.can_grow(work):
            return False
        for seq, num_tokens in work:
            table = seq.table
            assert table is not None
            self.cause = seq.group.request_id
            if table.tail_shared:
                self._copy_on_write(seq, table)
            missing = num_tokens - table.capacity
            if missing > 0:
                new = self.pool.allocate(-(-missing // self.block_size))
                assert new is not None, "counted before"
                table.block_ids += new
                table.capacity += len(new) * self.block_size
        return True

    def add_blocks(self, seqs: Sequence[Seq]) -> int:
        """One more block for each of these tables, in order, as if each grew by a token: how many got one before blocks ran out."""
        if self._on_event is None and type(self.layout) is Paged and len(seqs) <= len(self.pool.free):
            size = self.block_size
            new = self.pool.allocate(len(seqs))
            assert new is not None, "counted before"
            for seq, block_id in zip(seqs, new, strict=True):
                table = seq.table
                table.block_ids.append(block_id)  # type: ignore[union-attr]
                table.capacity += size  # type: ignore[union-attr]
            self.cause = seqs[-1].group.request_id
            return len(seqs)
        for i, seq in enumerate(seqs):
            assert seq.table is not None
            if not self.grow([(seq, seq.table.capacity + 1)]):
                return i
        return len(seqs)

    def _copy_on_write(self, seq: Seq, table: BlockTable) -> None:
        table.tail_shared = False
        source = self._shared_write_block(seq, {})
        if source < 0:
            return
        new = self.pool.allocate(1)
        assert new is not None, "counted before"
        num_parked = self.parking.held(self.pool)[source] if self.depth else 0
        if self.pool.blocks[source].ref_count - num_parked > 1:  # whoever holds it too goes on writing behind what is copied
            self.pool.release((source,))
        else:
            self.let_go_read((source,))
        table.block_ids[seq.num_computed // self.block_size - table.num_dropped_blocks] = new[0]
        table.num_sent = -1
        self.pending_copies.append((seq.seq_id, source, new[0]))
        self.tell("copy", self.pool, new)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Copies to do in this step; forgets them."""
        if not self.pending_copies and self.regions is None:
            return ()
        copies = tuple(BlockCopy(source, destination) for _, source, destination in self.pending_copies)
        if self.regions is not None:
            self.num_relocated += sum(seq_id in self.regions.relocated for seq_id, _, _ in self.pending_copies)
            self.regions.relocated.clear()
        if self.depth:
            self.parking.note_copies(self.pool.now.step, [copy.source for copy in copies])
        self.pending_copies.clear()
        return copies

    def can_grow_later(self, work: Work) -> bool:
        """Whether `grow(work)` would succeed once the steps in flight have landed (with regions: whether anything will come free)."""
        if not len(self.parking):
            return False
        return self.regions is not None or self.num_to_grow(work) <= self.pool.num_available + self.parking.num_landing

    # ------------------------------------------------------------ forks, letting go

    def let_go(self, block_ids: Sequence[int], seq: Seq, preempted: bool = False) -> None:
        """A table of `seq` gives up these references: now, or once the steps in flight that touch the blocks for it have landed."""
        until = self.parking.busy_until(seq, block_ids) if self.depth else -1
        if until >= 0:
            self.parking.park(until, block_ids, preempted)
        else:
            self.pool.release(block_ids, preempted)

    def let_go_read(self, block_ids: Sequence[int], pool: BlockPool | None = None, preempted: bool = False) -> None:
        """Give up references to blocks that the plan in the making reads (copies, transfers): now, or at depth 1 once it has landed."""
        pool = pool or self.pool
        if self.depth:
            self.parking.park(pool.now.step, block_ids, preempted, pool)
        else:
            pool.release(block_ids, preempted)

    def fork(self, parent: Seq, child: Seq, num_tokens: int) -> None:
        """`child` takes over the first `num_tokens` computed tokens of `parent`: shared blocks, or a copy where layouts can't share."""
        source = parent.table
        assert source is not None
        self.cause = child.group.request_id
        assert num_tokens <= parent.num_computed
        if self.regions is not None:
            self.regions.fork(parent, child, num_tokens)
        else:
            shared = source.block_ids[: self.num_blocks_for(num_tokens) - source.num_dropped_blocks]
            for block_id in shared:
                self.pool.share(block_id)
            child.table = BlockTable(shared, self.block_size, source.num_dropped_blocks, source.num_head_blocks)
            child.table.num_full = min(source.num_full, num_tokens // self.block_size)
            if num_tokens % self.block_size:
                child.table.tail_shared = source.tail_shared = True
                if parent.flight >= 0:  # it reads this block beyond what it shares: whoever writes next, in the plan after, copies
                    self.pool.share(shared[-1])
                    self.parking.park(parent.flight, shared[-1:])
        child.num_computed = num_tokens
        child.keys = parent.keys[: num_tokens // self.block_size]

    def release(self, seq: Seq, preempted: bool = False, keeps: bool = True) -> None:
        """Let go of a sequence's blocks, tail first, and of copies planned for them. A layout's slot `keeps` what was computed."""
        self.cause = seq.group.request_id
        if seq.table is not None and self.regions is not None:
            until = self.parking.busy_until(seq, seq.table.block_ids) if self.depth else -1
            if until >= 0:
                self.parking.park_region(until, seq, keeps)
            else:
                self.regions.release(seq, keeps)
        elif seq.table is not None:
            self.pending_copies = [copy for copy in self.pending_copies if copy[0] != seq.seq_id]
            self.let_go(seq.table.block_ids[::-1], seq, preempted)
        seq.table = None
        seq.num_computed = 0
        seq.flight = -1

    def release_for_fork(self, seq: Seq) -> None:
        """Let go of a sequence; where blocks aren't shared, its region is for a fork of its group that is about to be made."""
        if self.regions is not None:
            self.regions.set_aside(seq)
        else:
            self.release(seq)

    def spare_regions(self, group: Group) -> list[list[int]]:
        """Regions kept for forks of a group."""
        return [] if self.regions is None else self.regions.spare.get(group.group_id, [])

    def release_spares(self, group: Group) -> None:
        """Give back regions that were kept for forks of a group that has left."""
        self.cause = group.request_id
        if self.regions is not None:
            self.regions.release_spares(group)

    def reset_cache(self) -> bool:
        """Forget all cached content. False, and nothing changed, while some table holds a block."""
        is_reset = self.pool.reset_cache()
        if is_reset and self.regions is not None:
            self.regions.reset()
        return is_reset

    def drop_unread(self, seq: Seq) -> None:
        """Free whole blocks that the compression policy says no later query reads: at the head, behind the sinks."""
        table, head = seq.table, self._num_head_blocks
        assert table is not None
        count = self._num_unread(seq.num_computed) // self.block_size - head - table.num_dropped_blocks
        if count <= 0 or not self.layout.shares_blocks:
            return
        self.cause = seq.group.request_id
        unread = table.block_ids[head : head + count]
        self.tell("drop", self.pool, unread)
        self.let_go(unread[::-1], seq)
        del table.block_ids[head : head + count]
        table.num_head_blocks = head
        table.num_dropped_blocks += count
        table.num_sent = -1

    def _num_unread(self, num_computed: int) -> int:
        """What the compression policy says can be dropped. IllegalDecision: something that the next query sees."""
        window = self.compression.attention_window
        most = 0 if window is None else max(0, num_computed + 1 - window)
        num = self.compression.num_droppable_tokens(num_computed)
        if not isinstance(num, int) or num > most:
            raise IllegalDecision("compression", self.compression, f"num_droppable_tokens({num_computed}) = {num!r}",
                                  f"a whole number of at most {most}: the tokens that have left the window")  # fmt: skip
        return num


class _AnyPlace(LayoutPolicy):
    """Swap space needs no layout: lowest free ids."""

    def place(self, num_blocks: int, free: FreeView) -> list[int] | None:
        """Lowest ids."""
        return free.lowest(num_blocks)
