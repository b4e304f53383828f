"""Regions: where a layout does not share blocks, each sequence owns the blocks of its table, from entry to end.

Every placement is tried on a copy of the free blocks first, for all sequences of a group and with the slots that would have to be emptied;
only what was found is then taken. So a predicate is the action without its effect, and a refusal leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvlab.cache.free_blocks import FreeBlocks, check_placed
from kvlab.cache.prefix import PrefixMatch
from kvlab.cache.slots import Slot, Slots
from kvlab.cache.table import BlockTable, Group, Seq, Work
from kvlab.policies.base import SlotLayout

if TYPE_CHECKING:
    from kvlab.cache.manager import KVCacheManager


class Placement(NamedTuple):
    """Where regions would lie: `dropped` blocks that the `slots` to be used keep, and all of `purged` slots, come free for it."""

    regions: list[list[int]]
    slots: list[Slot]
    dropped: list[int]
    purged: list[Slot]


class Step(NamedTuple):
    """How a region would grow: `seq` is None for one that is set aside. It gets blocks `added` and gives `removed`."""

    seq: Seq | None
    old: list[int]
    new: list[int]
    added: list[int]
    removed: list[int]


class Growth(NamedTuple):
    """How regions would grow, in this order, and which slots are emptied for it."""

    steps: list[Step]
    purged: list[Slot]


class Regions:
    """Regions of a `KVCacheManager` whose layout shares no blocks. Failure is a value and changes nothing."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self.slots = Slots(kv.layout) if isinstance(kv.layout, SlotLayout) else None
        self.spare: dict[int, list[list[int]]] = {}
        """Regions set aside for forks, by group id."""
        self.relocated: set[int] = set()
        """Sequences whose pending copies are moves to another region."""

    # ---------------------------------------------------------------- looking

    def find_kept(self, seq: Seq, num_tokens: int) -> PrefixMatch:
        """What the slot that the sequence would get keeps of its first `num_tokens` tokens. The last block, nobody else's, may go on in
        the middle."""
        chosen = self.slots.choose(seq, 1) if self.slots is not None else None
        if not chosen:
            return PrefixMatch([], 0)
        shared = min(chosen[0].num_shared(seq.tokens, seq.group.request.cache_salt), num_tokens)
        return PrefixMatch(chosen[0].block_ids[: self._kv.num_blocks_for(shared)], shared)

    def kept_blocks(self) -> list[int]:
        """Blocks kept in slots."""
        return self.slots.kept_blocks() if self.slots is not None else []

    def _sizes(self, group: Group, work: Work) -> list[int]:
        """Blocks of each region of a group: for the sequences that have a table now, then for those still to branch off."""
        targets = {seq.seq_id: num_tokens for seq, num_tokens in work}
        seqs = [seq for seq in group.seqs if seq.table is not None] or list(group.seqs[:1])
        tokens = [max(seq.num_computed, targets.get(seq.seq_id, 0)) for seq in seqs]
        sizes = [self._kv.region_blocks(seq, num) for seq, num in zip(seqs, tokens, strict=True)]
        return sizes + [self._kv.region_blocks(seqs[0], max(tokens))] * (group.num_sequences - len(seqs))

    def why_not(self, group: Group, hits: Sequence[int], work: Work) -> str:
        """What keeps a group out that finds no place: "slots", "blocks", or "fragmentation" if there are blocks enough."""
        if self.slots is not None and self.slots.num_idle < group.num_sequences:
            return "slots"
        is_enough = sum(self._sizes(group, work)) - len(hits) <= self._kv.num_available(hits)
        return "fragmentation" if is_enough else "blocks"

    # ------------------------------------------------------------------ entry

    def find(self, group: Group, hits: Sequence[int], work: Work) -> Placement | None:
        """Places for all regions of a group that enters: `hits` are kept blocks its first sequence goes on after. Changes nothing."""
        sizes = self._sizes(group, work)
        slots = self.slots.choose(group.seqs[0], len(sizes)) if self.slots is not None else []
        if slots is None:
            return None
        sizes[0] -= len(hits)
        dropped = [b for i, slot in enumerate(slots) for b in slot.block_ids[0 if i else len(hits) :]]
        free = self._kv.pool.free.also(dropped)
        purged: list[Slot] = []
        while True:
            regions = self._place_all(sizes, free)
            if regions is not None:
                return Placement(regions, slots, dropped, purged)
            if not self._purge((*slots, *purged), purged, free):
                return None

    def _place_all(self, sizes: Iterable[int], free: FreeBlocks) -> list[list[int]] | None:
        regions: list[list[int]] = []
        trial = free.also(())
        for size in sizes:
            region = self._kv.layout.place(size, trial)
            if region is None:
                return None
            check_placed(self._kv.layout, region, size, trial)
            trial.take(region)
            regions.append(region)
        return regions

    def _purge(self, spared: Sequence[Slot], purged: list[Slot], free: FreeBlocks) -> bool:
        """Count one more unused slot as emptied; False: there is none."""
        slot = self.slots.next_to_purge(spared) if self.slots is not None else None
        if slot is None:
            return False
        purged.append(slot)
        for block_id in slot.block_ids:
            free.give(block_id)
        return True

    def take(self, group: Group, found: Placement, hits: Sequence[int], seqs: Sequence[Seq], num_found: int = 0) -> list[list[int]]:
        """Carry a placement out. The regions of `seqs`; those left over are set aside for forks. `num_found`: tokens in `hits`."""
        pool = self._kv.pool
        pool.reuse(hits)
        pool.drop(found.dropped)
        for slot in found.purged:
            pool.drop(slot.empty())
        for region in found.regions:
            pool.take(region)
        if self.slots is not None:
            for slot in found.slots:
                slot.empty()
            self.slots.occupy(found.slots, seqs, group.group_id, num_found)
        if found.regions[len(seqs) :]:
            self.spare[group.group_id] = found.regions[len(seqs) :]
        return found.regions[: len(seqs)]

    def enter(self, group: Group, hits: list[int], num_tokens: int, num_cached: int) -> bool:
        """See `KVCacheManager.enter`."""
        seq = group.seqs[0]
        found = self.find(group, hits, [(seq, num_tokens)])
        if found is None:
            return False
        self._kv.cause = group.request_id
        (region,) = self.take(group, found, hits, (seq,), max(0, num_cached))
        seq.table = BlockTable(hits + region, self._kv.block_size)
        seq.num_computed = max(0, num_cached)
        return True

    # ----------------------------------------------------------------- growth

    def num_to_grow(self, work: Work) -> int:
        """Blocks that regions need which are outgrown: at most so many are taken (their own come free)."""
        outgrown = [(seq, num) for seq, num in work if seq.table is not None and num > seq.table.capacity]
        return sum(self._kv.region_blocks(seq, num) for seq, num in outgrown)

    def find_growth(self, work: Work) -> Growth | None:
        """Places for every region that `work` outgrows, those set aside for forks of its group included. Changes nothing."""
        kv, steps, purged = self._kv, list[Step](), list[Slot]()
        wanted: list[tuple[Seq | None, list[int], int]] = []
        for seq, num_tokens in work:
            assert seq.table is not None
            if num_tokens > seq.table.capacity:
                wanted.append((seq, seq.table.block_ids, kv.region_blocks(seq, num_tokens)))
        if work and self.spare:
            first, most = work[0][0], max(num_tokens for _, num_tokens in work)
            spares = [region for region in self.spare.get(first.group.group_id, []) if len(region) < kv.num_blocks_for(most)]
            wanted += [(None, region, kv.region_blocks(first, most)) for region in spares]
        if not wanted:
            return Growth(steps, purged)
        is_last, free = len(wanted) == 1, kv.pool.free
        if not is_last:
            free = free.also(())
        for member, old, size in wanted:
            while (new := kv.layout.regrow(old, size, free)) is None:
                free = free.also(()) if is_last and not purged else free  # the pool's own is not to change
                if not self._purge(purged, purged, free):
                    return None
            step = self._step(member, old, new, size, free)
            steps.append(step)
            if not is_last:
                free.take(step.added)
                for block_id in step.removed if not kv.depth else ():  # else they come free later
                    free.give(block_id)
        return Growth(steps, purged)

    def _step(self, seq: Seq | None, old: list[int], new: list[int], size: int, free: FreeBlocks) -> Step:
        """What changes. IllegalDecision: blocks in use, too few, or not consecutive though the layout says so."""
        num_old, layout = len(old), self._kv.layout
        if new[:num_old] == old and not layout.is_contiguous:  # it stays and goes on elsewhere: long tables change by a block
            check_placed(layout, new[num_old:], size - num_old, free)
            return Step(seq, old, new, new[num_old:], [])
        check_placed(layout, new, size, free.also(old))
        kept, held = set(new), set(old)
        return Step(seq, old, new, [b for b in new if b not in held], [b for b in reversed(old) if b not in kept])

    def grow(self, work: Work) -> bool:
        """See `KVCacheManager.grow`."""
        found = self.find_growth(work)
        if found is None:
            return False
        kv = self._kv
        if work:
            kv.cause = work[0][0].group.request_id
        for slot in found.purged:
            kv.pool.drop(slot.empty())
        for seq, old, new, added, removed in found.steps:
            kv.pool.take(added)
            kv.let_go_read(removed)
            if seq is None:
                old[:] = new
            else:
                self._move(seq, old, new)
        return True

    def _move(self, seq: Seq, old: list[int], new: list[int]) -> None:
        """Give a sequence its larger region; blocks that are filled and lie elsewhere now are copied."""
        kv, table = self._kv, seq.table
        assert table is not None
        if new[: len(old)] == old:
            table.block_ids, table.capacity = new, len(new) * kv.block_size
            return
        # A block whose own copy is still to be done has its content in the copy's source, which is intact until copies run.
        origin = {destination: source for seq_id, source, destination in kv.pending_copies if seq_id == seq.seq_id}
        filled = kv.num_blocks_for(seq.num_computed)
        moved = [(origin.get(a, a), b) for a, b in zip(old[:filled], new, strict=False) if a in origin or a != b]
        kv.pending_copies = [copy for copy in kv.pending_copies if copy[0] != seq.seq_id]
        kv.pending_copies += [(seq.seq_id, a, b) for a, b in moved if a != b]
        kv.tell("copy", kv.pool, [b for a, b in moved if a != b])
        self.relocated.add(seq.seq_id)
        table.block_ids, table.capacity, table.num_sent = new, len(new) * kv.block_size, -1

    # ---------------------------------------------------------- forks, letting go

    def fork(self, parent: Seq, child: Seq, num_tokens: int) -> None:
        """`child` gets a region set aside for it, and a copy of the parent's first `num_tokens` tokens."""
        kv, source = self._kv, parent.table
        assert source is not None
        region = self.spare[child.group.group_id].pop(0)
        if self.slots is not None:
            self.slots.fork(child)
        child.table = BlockTable(region, kv.block_size)
        shared = source.block_ids[: kv.num_blocks_for(num_tokens)]
        origin = {destination: source_id for _, source_id, destination in kv.pending_copies}
        kv.pending_copies += [(child.seq_id, origin.get(a, a), b) for a, b in zip(shared, region, strict=False)]

    def set_aside(self, seq: Seq) -> None:
        """The region of a sequence that has ended is for a fork of its group."""
        kv = self._kv
        if seq.table is not None:
            kv.pending_copies = [copy for copy in kv.pending_copies if copy[0] != seq.seq_id]
            self.spare.setdefault(seq.group.group_id, []).append(seq.table.block_ids)
            if self.slots is not None:
                self.slots.set_aside(seq)
            seq.table = None
        seq.num_computed = 0

    def release(self, seq: Seq, keeps: bool) -> None:
        """Let go of a sequence's region. Its slot `keeps` what lies where the runner has been told that it does."""
        kv, table = self._kv, seq.table
        assert table is not None
        is_there = keeps and table.num_sent >= 0 and not any(copy[0] == seq.seq_id for copy in kv.pending_copies)
        num_kept = kv.num_blocks_for(self.slots.num_kept(seq)) if is_there and self.slots is not None else 0
        kv.pending_copies = [copy for copy in kv.pending_copies if copy[0] != seq.seq_id]
        kv.pool.release(reversed(table.block_ids[num_kept:]))
        if self.slots is not None:
            kv.pool.keep(table.block_ids[:num_kept])
            self.slots.release(seq, table.block_ids[:num_kept])

    def release_spares(self, group: Group) -> None:
        """Give back regions that were kept for forks of a group that has left."""
        for region in self.spare.pop(group.group_id, []):
            self._kv.pool.release(reversed(region))
        if self.slots is not None:
            self.slots.release_spares(group.group_id)

    def reset(self) -> None:
        """Empty every unused slot."""
        for slot in self.slots.idle() if self.slots is not None else ():
            self._kv.pool.drop(slot.empty())
