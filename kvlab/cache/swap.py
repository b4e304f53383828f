"""Swap: a whole group's filled blocks go to the cpu tier and come back. One kind of transfer between tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlab.cache.table import BlockTable, Group, Seq, Work
from kvlab.types import BlockTransfer

if TYPE_CHECKING:
    from kvlab.cache.manager import KVCacheManager
    from kvlab.cache.regions import Regions


class Swapper:
    """Moves groups between the tiers of a `KVCacheManager`. Failure is a value and changes nothing."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def _num_to_grow(self, group: Group, work: Work) -> int:
        """What `num_to_grow` will say once the swapped group is back."""
        held: dict[int, int] = {}
        for seq in group.seqs:
            for block_id in seq.table.block_ids if seq.table is not None else ():
                held[block_id] = held.get(block_id, 0) + 1
        need = 0
        for seq, num_tokens in work:
            table = seq.table
            assert table is not None
            need += max(0, -(-(num_tokens - table.capacity) // self._kv.block_size))
            i = seq.num_computed // self._kv.block_size - table.num_dropped_blocks
            if i < len(table.block_ids) and held[table.block_ids[i]] > 1:
                held[table.block_ids[i]] -= 1
                need += 1
        return need

    def _filled_blocks(self, seqs: Sequence[Seq]) -> dict[int, int]:
        """Distinct blocks that hold computed tokens -> filled slots, in table order."""
        filled: dict[int, int] = {}
        for seq in seqs:
            if seq.table is None:
                continue
            slots = seq.num_computed - seq.table.num_dropped_blocks * self._kv.block_size
            for i, block_id in enumerate(seq.table.block_ids[: self._kv.num_blocks_for(slots)]):
                filled[block_id] = max(filled.get(block_id, 0), min(self._kv.block_size, slots - i * self._kv.block_size))
        return filled

    def num_swap_blocks(self, group: Group) -> int:
        """Blocks that swapping the group out would move (a shared block once)."""
        return len(self._filled_blocks(group.seqs))

    def num_distinct_tokens(self, group: Group) -> int:
        """Computed tokens of the group, those in shared blocks once: what coming back by recompute costs (at most a block's tokens
        more for each sequence that has copied a block it shared)."""
        dropped = max((seq.table.num_dropped_blocks for seq in group.seqs if seq.table is not None), default=0)
        return dropped * self._kv.block_size + sum(self._filled_blocks(group.seqs).values())

    def swap_out(self, group: Group) -> tuple[BlockTransfer, ...] | None:
        """Move the group's filled blocks to the cpu tier; None, and nothing changed, when there is no room."""
        filled = self._filled_blocks(group.seqs)
        self._kv.cause = group.request_id
        cpu_ids = self._kv.cpu_pool.allocate(len(filled))
        if cpu_ids is None:
            return None
        self._kv.tell("swap_out", self._kv.pool, filled)
        to_cpu = dict(zip(filled, cpu_ids, strict=True))
        # A block whose copy is still to be done has its content in the copy's source, which is intact until copies run.
        pending = {destination: source for _, source, destination in self._kv.pending_copies}
        transfers = tuple(BlockTransfer("gpu", pending.get(b, b), "cpu", to_cpu[b], filled[b]) for b in filled)
        for seq in group.seqs:
            table = seq.table
            if table is None:
                continue
            kept = [to_cpu[b] for b in table.block_ids if b in to_cpu]
            dropped, head, computed = table.num_dropped_blocks, table.num_head_blocks, seq.num_computed
            if self._kv.depth:  # the plan in the making reads its blocks
                seq.flight = self._kv.pool.now.step
            self._kv.release(seq, preempted=True, keeps=False)
            seq.table = BlockTable(kept, self._kv.block_size, dropped, head)
            seq.num_computed = computed
        self._kv.release_spares(group)
        return transfers

    def swapped_block_ids(self, group: Group) -> list[int]:
        """Distinct cpu blocks of a swapped group, in table order."""
        return list(dict.fromkeys(b for seq in group.seqs if seq.table is not None for b in seq.table.block_ids))

    def can_swap_in(self, group: Group, work: Work) -> bool:
        """Whether the group's blocks and those for its next `work` fit."""
        if self._kv.regions is not None:
            return self._kv.regions.find(group, [], work) is not None
        return len(self.swapped_block_ids(group)) + self._num_to_grow(group, work) <= self._kv.pool.num_available

    def swap_in(self, group: Group, work: Work) -> tuple[BlockTransfer, ...] | None:
        """Bring a swapped group back; None, and nothing changed, when it and its next `work` (for which `grow` is to be called) do not
        fit."""
        if self._kv.regions is not None:
            return self._swap_in_regions(self._kv.regions, group, work)
        if not self.can_swap_in(group, work):
            return None
        self._kv.cause = group.request_id
        cpu_ids = self.swapped_block_ids(group)
        gpu_ids = self._kv.pool.allocate(len(cpu_ids))
        assert gpu_ids is not None, "counted before"
        to_gpu = dict(zip(cpu_ids, gpu_ids, strict=True))
        filled = self._filled_blocks(group.seqs)
        transfers = tuple(BlockTransfer("cpu", c, "gpu", to_gpu[c], filled[c]) for c in cpu_ids)
        self._kv.tell("swap_in", self._kv.pool, gpu_ids)
        held: dict[int, int] = {}
        for seq in group.seqs:
            if seq.table is None:
                continue
            for cpu_id in seq.table.block_ids:
                held[cpu_id] = held.get(cpu_id, 0) + 1
                if held[cpu_id] > 1:
                    self._kv.pool.share(to_gpu[cpu_id])
            seq.table = BlockTable([to_gpu[c] for c in seq.table.block_ids], self._kv.block_size, seq.table.num_dropped_blocks,
                                   seq.table.num_head_blocks)  # fmt: skip
            seq.table.tail_shared = len(group.seqs) > 1
        self._kv.let_go_read(cpu_ids[::-1], self._kv.cpu_pool)
        return transfers

    def transfers_for_copies(self, group: Group, transfers: Sequence[BlockTransfer]) -> tuple[BlockTransfer, ...]:
        """The copies of a group that comes back in this step, as transfers of their own: copies are done before blocks come back."""
        back = {t.destination: t for t in transfers}
        own = {seq.seq_id for seq in group.seqs}
        moved = tuple(back[source]._replace(destination=to) for seq_id, source, to in self._kv.pending_copies if seq_id in own)
        self._kv.pending_copies = [copy for copy in self._kv.pending_copies if copy[0] not in own]
        return moved

    def _swap_in_regions(self, regions: Regions, group: Group, work: Work) -> tuple[BlockTransfer, ...] | None:
        found = regions.find(group, [], work)
        if found is None:
            return None
        self._kv.cause = group.request_id
        seqs = [seq for seq in group.seqs if seq.table is not None]
        filled = self._filled_blocks(seqs)
        transfers: list[BlockTransfer] = []
        for seq, region in zip(seqs, regions.take(group, found, [], seqs), strict=True):
            assert seq.table is not None
            transfers += [BlockTransfer("cpu", c, "gpu", g, filled[c]) for c, g in zip(seq.table.block_ids, region, strict=False)]
            self._kv.tell("swap_in", self._kv.pool, region[: len(seq.table.block_ids)])
            self._kv.let_go_read(seq.table.block_ids[::-1], self._kv.cpu_pool)
            seq.table = BlockTable(region, self._kv.block_size, seq.table.num_dropped_blocks)
        return tuple(transfers)

    def release_swapped(self, group: Group) -> None:
        """Let go of a swapped group's cpu blocks (abort)."""
        self._kv.cause = group.request_id
        self._kv.let_go_read(self.swapped_block_ids(group)[::-1], self._kv.cpu_pool)
        for seq in group.seqs:
            seq.table = None
            seq.num_computed = 0
