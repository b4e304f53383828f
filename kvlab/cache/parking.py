"""Blocks that were let go while a step in flight still touches them: they stay held until that step has landed (depth 1).

A parked block keeps the reference of the table that let it go. So nothing else in the pools need know: it is neither free nor evictable,
and a later request may find its content all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from kvlab.cache.pool import BlockPool
from kvlab.cache.table import Seq

if TYPE_CHECKING:
    from kvlab.cache.manager import KVCacheManager


class _Parked(NamedTuple):
    """`release` lets go for good, once step `until` has landed. `block_ids` of `pool`, each once for every reference."""

    until: int
    pool: BlockPool
    block_ids: tuple[int, ...]
    cause: str
    release: Callable[[], None]


class Ghost:
    """A sequence's state when it let go of its region, so that the region's slot can keep it later. Satisfies `Seq`."""

    def __init__(self, seq: Seq, seq_id: int) -> None:
        self.seq_id = seq_id
        self.group = seq.group
        self.tokens = seq.tokens[: seq.num_computed]
        self.num_computed = seq.num_computed
        self.table = seq.table
        self.keys: list[bytes] = []
        self.packed = seq.packed
        self.flight = -1


class Parking:
    """Parked blocks of a `KVCacheManager`. Empty at depth 0."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._parked: list[_Parked] = []
        self._num_ghosts = 0
        self._last_landed = -1
        self._read: dict[int, int] = {}
        self.ghosts: list[int] = []
        """Numbers (below 0) under which the slots of parked regions are kept."""

    def __len__(self) -> int:
        return len(self._parked)

    def note_copies(self, step: int, sources: Iterable[int]) -> None:
        """Step `step` copies from these blocks, whoever holds them."""
        self._read.update(dict.fromkeys(sources, step))

    def busy_until(self, seq: Seq, block_ids: Iterable[int]) -> int:
        """The last step that touches these blocks of a sequence: one in flight that computes it or copies from them, or, where a copy is
        still to be done, the next. -1: none."""
        until = seq.flight
        for block_id in block_ids if self._read else ():
            until = max(until, self._read.get(block_id, -1))
        if self._kv.pending_copies:
            held = set(block_ids)
            if any(source in held and seq_id != seq.seq_id for seq_id, source, _ in self._kv.pending_copies):
                until = max(until, self._kv.pool.now.step + 1)
        return until

    def park(self, until: int, block_ids: Iterable[int], preempted: bool = False, pool: BlockPool | None = None) -> None:
        """Let go of blocks of the gpu tier (or `pool`) once step `until` has landed."""
        pool, ids = pool or self._kv.pool, tuple(block_ids)
        if until <= self._last_landed:  # between steps, with nothing in flight
            pool.release(ids, preempted)
        elif ids:
            self._parked.append(_Parked(until, pool, ids, self._kv.cause, lambda: pool.release(ids, preempted)))

    def park_region(self, until: int, seq: Seq, keeps: bool) -> None:
        """Let go of a sequence's region (and slot) once step `until` has landed."""
        regions, copies = self._kv.regions, self._kv.pending_copies
        assert regions is not None
        assert seq.table is not None
        self._kv.pending_copies = [copy for copy in copies if copy[0] != seq.seq_id]
        keeps = keeps and len(self._kv.pending_copies) == len(copies)  # else not all lies where its table says
        self._num_ghosts += 1
        ghost = Ghost(seq, -self._num_ghosts)
        if regions.slots is not None:
            regions.slots.rename(seq.seq_id, ghost.seq_id)
            self.ghosts.append(ghost.seq_id)

        def release() -> None:
            if regions.slots is not None:
                self.ghosts.remove(ghost.seq_id)
            regions.release(ghost, keeps)

        self._parked.append(_Parked(until, self._kv.pool, tuple(seq.table.block_ids), self._kv.cause, release))

    def landed(self, step: int) -> None:
        """Step `step` is over: what waited for it is let go."""
        self._last_landed = step
        if self._read:
            self._read = {block_id: until for block_id, until in self._read.items() if until > step}
        self._let_go_until(step)

    def let_go_all(self) -> None:
        """Nothing is in flight and no request is left: what waits for a step (to copy for a fork that ended with its parent) which will
        never be made is let go."""
        if self._parked:
            assert not self._kv.pending_copies, f"copies {self._kv.pending_copies} of nobody"
            self._let_go_until(max(parked.until for parked in self._parked))

    def _let_go_until(self, step: int) -> None:
        over = [parked for parked in self._parked if parked.until <= step]
        self._parked = [parked for parked in self._parked if parked.until > step]
        for parked in over:
            self._kv.cause = parked.cause
            parked.release()

    def held(self, pool: BlockPool) -> Counter[int]:
        """Block -> references that are parked, of one tier."""
        return Counter(block_id for parked in self._parked if parked.pool is pool for block_id in parked.block_ids)

    @property
    def num_landing(self) -> int:
        """Blocks of the gpu tier that an allocation could have once everything parked has landed."""
        pool = self._kv.pool
        return sum(pool.blocks[block_id].ref_count == num for block_id, num in self.held(pool).items())
