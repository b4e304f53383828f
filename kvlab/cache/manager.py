"""`KVCacheManager`: block tables over the pools. What vLLM calls the block space manager. Swap is `kvlab.cache.swap`.

A table maps a sequence's slots to blocks. Slots are counted from the first kept token, positions from the first token:

    positions   0 ......... dropped*B | ............ num_computed | ...... capacity
    slots       (given up)            | 0 .. written ............ | free slots of the table's last blocks
    block_ids                         | [0] [1] [2] ...                        [-1]

Every question "would it fit" is asked before anything is taken; failure is a value and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvlab.cache.pool import BlockPool, CachedBlock
from kvlab.cache.shareable import ShareableIndex
from kvlab.cache.swap import Swapper
from kvlab.cache.table import BlockTable, Group, Seq, Work
from kvlab.policies.base import CompressionPolicy, EvictionPolicy, FreeView, LayoutPolicy, PrefixCachePolicy
from kvlab.types import BlockCopy, Now


class KVCacheManager:
    """Tables, sharing, copy-on-write, publication, swap.

    Args:
        num_blocks, num_cpu_blocks, block_size: sizes of the pools.
        eviction, prefix_cache, layout, compression: the policies asked.
        max_model_len: tokens a sequence may reach (a layout may reserve for them).
        track_shareable: count tokens that were cached but lost to block granularity.
        on_event: called as (kind, tier, block) on block events, when somebody listens.
    """

    def __init__(self, num_blocks: int, num_cpu_blocks: int, block_size: int, eviction: EvictionPolicy,
                 prefix_cache: PrefixCachePolicy, layout: LayoutPolicy, compression: CompressionPolicy, max_model_len: int,
                 track_shareable: bool = True, on_event: Callable[[str, str, CachedBlock], None] | None = None) -> None:  # fmt: skip
        self.block_size = block_size
        self.layout = layout
        self.prefix_cache = prefix_cache
        self.compression = compression
        self.max_model_len = max_model_len
        self.pool = BlockPool("gpu", num_blocks, block_size, eviction, layout, on_event)
        self.cpu_pool = BlockPool("cpu", num_cpu_blocks, block_size, None, layout if layout.shares_blocks else _AnyPlace(), on_event)
        self.pending_copies: list[tuple[int, int, int]] = []  # (seq_id, source, destination)
        self.cause = ""
        """Request on whose behalf blocks change just now, for block events."""
        self._on_event = on_event
        self.spare: dict[int, list[list[int]]] = {}
        """Regions set aside for forks, by group id."""
        self.swapper = Swapper(self)
        self.shareable = ShareableIndex() if track_shareable and prefix_cache.enabled else None
        if self.shareable is not None:
            self.pool.on_forget = self.shareable.discard

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

    # ------------------------------------------------------------ content keys

    def _root(self, seq: Seq) -> bytes:
        return self.prefix_cache.root(seq.group.request.cache_salt)

    def _extend_keys(self, seq: Seq, num_blocks: int) -> None:
        keys, tokens, size = seq.keys, seq.tokens, self.block_size
        while len(keys) < num_blocks:
            i = len(keys)
            keys.append(self.prefix_cache.key(keys[-1] if keys else self._root(seq), tokens[i * size : (i + 1) * size]))

    def find_prefix(self, seq: Seq, num_tokens: int) -> list[int]:
        """Cached blocks of the longest contiguous prefix of `seq`: full blocks only, at most `num_tokens` tokens."""
        if not self.prefix_cache.enabled:
            return []
        most = num_tokens // self.block_size
        self._extend_keys(seq, most)
        hits: list[int] = []
        find = self.pool.by_content.get
        for key in seq.keys[:most]:
            block = find(key)
            if block is None:
                break
            hits.append(block.block_id)
        return hits

    def prefix_keys(self, seq: Seq) -> list[bytes]:
        """Content keys of the full blocks up to the last token but one; empty without a prefix cache."""
        if not self.prefix_cache.enabled:
            return []
        most = (len(seq.tokens) - 1) // self.block_size
        self._extend_keys(seq, most)
        return seq.keys[:most]

    def num_shareable_lost(self, seq: Seq, num_hits: int) -> int:
        """Tokens after the hits that some cached block also holds, in a block that does not match as a whole."""
        if self.shareable is None:
            return 0
        size = self.block_size
        rest = tuple(seq.tokens[num_hits * size : min((num_hits + 1) * size, len(seq.tokens) - 1)])
        return self.shareable.num_shared(seq.keys[num_hits - 1] if num_hits else self._root(seq), rest) if rest else 0

    def publish(self, seq: Seq) -> None:
        """Offer every block of `seq` that is full of computed, accepted tokens. Called after a commit."""
        table = seq.table
        assert table is not None
        full = seq.num_computed // self.block_size
        if not self.prefix_cache.enabled or full <= table.num_full:
            return
        self.cause = seq.group.request_id
        self._extend_keys(seq, full)
        for i in range(max(table.num_full, table.num_dropped_blocks), full):
            parent = seq.keys[i - 1] if i else None
            fresh = self.pool.blocks[table.block_ids[i - table.num_dropped_blocks]].content == b""
            if fresh and self.pool.publish(table.block_ids[i - table.num_dropped_blocks], seq.keys[i], parent, i) and self.shareable:
                tokens = tuple(seq.tokens[i * self.block_size : (i + 1) * self.block_size])
                self.shareable.add(seq.keys[i], parent or self._root(seq), tokens)
        table.num_full = full

    # ------------------------------------------------------------- entry, growth

    def region_blocks(self, seq: Seq, num_tokens: int) -> int:
        """Blocks the layout takes for a sequence that must hold `num_tokens` now."""
        group = seq.group
        return self.layout.reserve_blocks(self.num_blocks_for(num_tokens), group.num_prompt_tokens, group.max_tokens,
                                          self.max_model_len, self.block_size)  # fmt: skip

    def num_available(self, hits: Sequence[int]) -> int:
        """free + evictable blocks other than `hits`."""
        return self.pool.num_available - self.pool.num_evictable_of(hits)

    def can_enter(self, group: Group, hits: list[int], num_tokens: int) -> bool:
        """Whether `enter` would succeed."""
        if self.layout.shares_blocks:
            return self.num_blocks_for(num_tokens) - len(hits) <= self.num_available(hits)
        size = self.region_blocks(group.seqs[0], num_tokens)
        if size * group.num_sequences > self.pool.num_free:
            return False
        return group.num_sequences == 1 or self.pool.free.count_runs(size) >= group.num_sequences

    def enter(self, group: Group, hits: list[int], num_tokens: int) -> bool:
        """Give the group's first sequence a table that begins with `hits` and covers `num_tokens`. False: no room, nothing changed."""
        if not self.can_enter(group, hits, num_tokens):
            return False
        seq = group.seqs[0]
        self.cause = group.request_id
        self.pool.hit(hits)
        regions: list[list[int]] = []
        for _ in range(1 if self.layout.shares_blocks else group.num_sequences):
            new = self.pool.allocate(self.region_blocks(seq, num_tokens) - len(hits))
            if new is None:  # the layout found no place (fragmentation)
                for region in regions:
                    self.pool.release(reversed(region))
                self.pool.release(reversed(hits))
                return False
            regions.append(new)
        seq.table = BlockTable(hits + regions[0], self.block_size)
        seq.num_computed = len(hits) * self.block_size
        seq.table.num_full = len(hits)
        if regions[1:]:
            self.spare[group.group_id] = regions[1:]
        return True

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
        """New blocks that `grow(work)` takes: missing ones and copies of shared blocks about to be written."""
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
        return self.num_to_grow(work) <= self.pool.num_available

    def grow(self, work: Work) -> bool:
        """Make each table cover its tokens and own the block it writes. All or nothing."""
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

    def _copy_on_write(self, seq: Seq, table: BlockTable) -> None:
        table.tail_shared = False
        source = self._shared_write_block(seq, {})
        if source < 0:
            return
        new = self.pool.allocate(1)
        assert new is not None, "counted before"
        self.pool.release((source,))
        table.block_ids[seq.num_computed // self.block_size - table.num_dropped_blocks] = new[0]
        table.num_sent = -1
        self.pending_copies.append((seq.seq_id, source, new[0]))
        self.tell("copy", self.pool, new)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Copies to do in this step; forgets them."""
        copies = tuple(BlockCopy(source, destination) for _, source, destination in self.pending_copies)
        self.pending_copies.clear()
        return copies

    # ------------------------------------------------------------ forks, letting go

    def fork(self, parent: Seq, child: Seq, num_tokens: int) -> None:
        """`child` takes over the first `num_tokens` computed tokens of `parent`: shared blocks, or a copy where layouts can't share."""
        source = parent.table
        assert source is not None
        self.cause = child.group.request_id
        assert num_tokens <= parent.num_computed
        kept = self.num_blocks_for(num_tokens) - source.num_dropped_blocks
        shared = source.block_ids[:kept]
        if self.layout.shares_blocks:
            for block_id in shared:
                self.pool.share(block_id)
            table = BlockTable(shared, self.block_size, source.num_dropped_blocks)
            table.num_full = min(source.num_full, num_tokens // self.block_size)
            if num_tokens % self.block_size:
                table.tail_shared = source.tail_shared = True
        else:
            spare = self.spare.get(child.group.group_id)
            region = spare.pop(0) if spare else self.pool.allocate(self.region_blocks(child, num_tokens))
            assert region is not None, "a region per sequence was taken at entry"
            table = BlockTable(region, self.block_size, source.num_dropped_blocks)
            pending = {destination: origin for _, origin, destination in self.pending_copies}
            self.pending_copies += [(child.seq_id, pending.get(a, a), b) for a, b in zip(shared, region, strict=False)]
        child.table = table
        child.num_computed = num_tokens
        child.keys = parent.keys[: num_tokens // self.block_size]

    def release(self, seq: Seq, preempted: bool = False) -> None:
        """Let go of a sequence's blocks, tail first, and of copies planned for them."""
        self.cause = seq.group.request_id
        if seq.table is not None:
            self.pending_copies = [copy for copy in self.pending_copies if copy[0] != seq.seq_id]
            self.pool.release(reversed(seq.table.block_ids), preempted)
            seq.table = None
        seq.num_computed = 0

    def spare_regions(self, group: Group) -> list[list[int]]:
        """Regions kept for forks of a group."""
        return self.spare.get(group.group_id, [])

    def release_spares(self, group: Group) -> None:
        """Give back regions that were kept for forks of a group that has left."""
        self.cause = group.request_id
        for region in self.spare.pop(group.group_id, []):
            self.pool.release(reversed(region))

    def drop_head(self, seq: Seq) -> None:
        """Free whole blocks at the head that the compression policy says no later query reads."""
        table = seq.table
        assert table is not None
        count = self.compression.num_droppable_tokens(seq.num_computed) // self.block_size - table.num_dropped_blocks
        if count <= 0 or not self.layout.shares_blocks:
            return
        self.cause = seq.group.request_id
        self.tell("drop", self.pool, table.block_ids[:count])
        self.pool.release(reversed(table.block_ids[:count]))
        del table.block_ids[:count]
        table.num_dropped_blocks += count
        table.num_sent = -1


class _AnyPlace(LayoutPolicy):
    """Swap space needs no layout: lowest free ids."""

    def place(self, num_blocks: int, free: FreeView) -> list[int] | None:
        """Lowest ids."""
        return free.lowest(num_blocks)
