"""Slots of a layout: each running sequence has one, and what it computed there is kept until the slot or its blocks are needed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvlab.cache.table import Seq
from kvlab.policies.base import SlotLayout, SlotView
from kvlab.types import IllegalDecision


class Slot:
    """`token_ids` and `block_ids`: what is kept while nobody uses it, computed after `root` (which stands for the salt). `num_found`:
    tokens that whoever uses it now has found there."""

    __slots__ = ("block_ids", "num_found", "released", "root", "slot_id", "token_ids")

    def __init__(self, slot_id: int) -> None:
        self.slot_id = slot_id
        self.token_ids: list[int] = []
        self.block_ids: list[int] = []
        self.root = ""
        self.released = -1
        self.num_found = 0

    def num_shared(self, token_ids: list[int], root: str) -> int:
        """Tokens that both begin with."""
        return _common_prefix_len(self.token_ids, token_ids) if root == self.root else 0

    def empty(self) -> list[int]:
        """Keep nothing; what was kept."""
        block_ids, self.token_ids, self.block_ids = self.block_ids, [], []
        return block_ids


class Slots:
    """Who uses which slot. Blocks that are kept belong to no table; the pool counts them as evictable."""

    def __init__(self, layout: SlotLayout) -> None:
        self.layout = layout
        self._idle = {slot_id: Slot(slot_id) for slot_id in range(layout.num_slots)}
        self._of_seq: dict[int, Slot] = {}
        self._spare: dict[int, list[Slot]] = {}
        self._num_released = 0

    @property
    def num_idle(self) -> int:
        """Slots that no sequence uses."""
        return len(self._idle)

    def kept_blocks(self) -> list[int]:
        """All kept blocks, by slot."""
        return [block_id for slot in self.idle() for block_id in slot.block_ids]

    def idle(self) -> list[Slot]:
        """Unused slots by id."""
        return [self._idle[slot_id] for slot_id in sorted(self._idle)]

    def choose(self, seq: Seq, num_slots: int) -> list[Slot] | None:
        """Slots for a sequence and for the forks it will have; None: not so many are unused. Changes nothing."""
        idle = self.idle()
        if num_slots > len(idle):
            return None
        chosen: list[Slot] = []
        for rank in range(num_slots):
            shared = [slot.num_shared(seq.tokens, seq.group.request.cache_salt) if rank == 0 else 0 for slot in idle]
            views = [SlotView(s.slot_id, len(s.token_ids), num, s.released) for s, num in zip(idle, shared, strict=True)]
            slot_id = self.layout.choose_slot(len(seq.tokens), views)
            chosen.append(self._checked(slot_id, idle))
            idle.remove(chosen[-1])
        return chosen

    def next_to_purge(self, spared: Collection[Slot]) -> Slot | None:
        """The slot that is emptied next because blocks are short; None: nothing is kept any more. Changes nothing."""
        idle = [slot for slot in self.idle() if slot.block_ids and slot not in spared]
        if not idle:
            return None
        views = [SlotView(s.slot_id, len(s.token_ids), 0, s.released) for s in idle]
        return self._checked(self.layout.purge_slot(views), idle)

    def _checked(self, slot_id: object, idle: Sequence[Slot]) -> Slot:
        for slot in idle:
            if slot.slot_id == slot_id:
                return slot
        raise IllegalDecision("layout", self.layout, f"slot {slot_id!r}", f"one of {[slot.slot_id for slot in idle]}")

    def occupy(self, slots: Sequence[Slot], seqs: Sequence[Seq], group_id: int, num_found: int) -> None:
        """The sequences use the first slots; those left over are for forks of the group. `num_found`: tokens found in the first."""
        for rank, slot in enumerate(slots):
            slot.num_found = 0 if rank else num_found
            del self._idle[slot.slot_id]
        self._of_seq.update({seq.seq_id: slot for seq, slot in zip(seqs, slots, strict=False)})
        if slots[len(seqs) :]:
            self._spare[group_id] = list(slots[len(seqs) :])

    def fork(self, child: Seq) -> None:
        """A fork uses one of its group's slots."""
        self._of_seq[child.seq_id] = self._spare[child.group.group_id].pop(0)

    def rename(self, seq_id: int, new: int) -> None:
        """A sequence's slot is used under another number from now on."""
        self._of_seq[new] = self._of_seq.pop(seq_id)

    def set_aside(self, seq: Seq) -> None:
        """A sequence has ended, and a fork of its group will use its slot."""
        slot = self._of_seq.pop(seq.seq_id)
        slot.num_found = 0
        self._spare.setdefault(seq.group.group_id, []).append(slot)

    def num_kept(self, seq: Seq) -> int:
        """Tokens that a sequence's slot keeps when it leaves: those computed that may be cached, and what others had left there."""
        return min(seq.num_computed, max(seq.group.num_cacheable_tokens, self._of_seq[seq.seq_id].num_found))

    def release(self, seq: Seq, block_ids: list[int]) -> None:
        """A sequence leaves its slot, which keeps these blocks of its first tokens."""
        num_kept = self.num_kept(seq) if block_ids else 0
        slot = self._of_seq.pop(seq.seq_id)
        slot.token_ids, slot.block_ids = seq.tokens[:num_kept], block_ids
        slot.root = seq.group.request.cache_salt
        self._free(slot)

    def release_spares(self, group_id: int) -> None:
        """Slots kept for forks of a group that has left."""
        for slot in self._spare.pop(group_id, []):
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        slot.released = self._num_released
        self._num_released += 1
        self._idle[slot.slot_id] = slot


def _common_prefix_len(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is quicker than comparing items."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
