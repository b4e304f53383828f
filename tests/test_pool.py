"""`BlockPool` by hand: what each event says of a block to the eviction policy, and what a refusal or a duplicate leaves."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.cache.pool import BlockPool
from kvlab.policies.base import EvictionPolicy
from kvlab.policies.eviction import Lru
from kvlab.policies.layout import Paged
from kvlab.types import BlockView, Now


class Notes(Lru):
    """LRU that keeps what it was told, and the block's record at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[Any, ...]] = []

    def _note(self, kind: str, block: BlockView, now: Now, *more: Any) -> None:
        ticks = (block.inserted_tick, block.counted_tick, block.used_tick)
        self.heard.append((kind, block.block_id, ticks, (block.inserted_s, block.used_s), block.num_hits, *more))

    def insert(self, block: BlockView, now: Now) -> None:
        self._note("insert", block, now)

    def hit(self, block: BlockView, now: Now) -> None:
        super().hit(block, now)
        self._note("hit", block, now)

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        super().release(block, now, preempted)
        self._note("release", block, now, preempted)

    def withhold(self, block: BlockView, now: Now) -> None:
        super().hit(block, now)
        self._note("withhold", block, now)

    def told(self) -> list[tuple[Any, ...]]:
        heard, self.heard = self.heard, []
        return heard


def pool_of(policy: EvictionPolicy, num_blocks: int = 3, on_event: Any = None) -> BlockPool:
    return BlockPool("gpu", num_blocks, 4, policy, Paged(), on_event)


def test_ticks_times_and_counts_of_a_block() -> None:
    """Insert at 1 s, release at 2 s, hit at 5 s, release at 7.5 s: the time of use is that of the latest of them, the time of insertion
    stays, and the tick of a count moves with inserts and hits only."""
    notes = Notes()
    pool = pool_of(notes)
    for step, now_s, act in (
        (0, 1.0, lambda: (pool.allocate(1), pool.publish(0, b"a", None, 0))),
        (1, 2.0, lambda: pool.release([0])),
        (2, 5.0, lambda: pool.hit([0])),
        (3, 7.5, lambda: pool.release([0], preempted=True)),
        (4, 9.0, lambda: pool.hit([0])),
    ):
        pool.now = Now(step, now_s)
        act()
    assert notes.told() == [
        ("insert", 0, (1, 1, 1), (1.0, 1.0), 0),
        ("release", 0, (1, 1, 2), (1.0, 2.0), 0, False),
        ("hit", 0, (1, 3, 3), (1.0, 5.0), 1),
        ("release", 0, (1, 3, 4), (1.0, 7.5), 1, True),
        ("hit", 0, (1, 5, 5), (1.0, 9.0), 2),
    ]


def test_a_block_that_is_cached_anew_begins_anew() -> None:
    """Block 0 is hit once as "a", evicted, and published as "b": no hits, and the time of its second insertion."""
    notes = Notes()
    pool = pool_of(notes, num_blocks=1)
    pool.allocate(1)
    pool.publish(0, b"a", None, 0)
    pool.release([0])
    pool.hit([0])
    pool.release([0])
    pool.now = Now(7, 3.0)
    assert pool.allocate(1) == [0]
    assert (pool.num_evicted, pool.find(b"a")) == (1, None)
    pool.publish(0, b"b", b"parent", 1)
    assert notes.told()[-1] == ("insert", 0, (5, 5, 5), (3.0, 3.0), 0)


def test_no_more_is_evicted_than_is_missing() -> None:
    """Three blocks, two of them cached, one free: an allocation of two evicts one, and that is the one used first."""
    pool = pool_of(Lru())
    assert pool.allocate(2) == [0, 1]
    pool.publish(0, b"a", None, 0)
    pool.publish(1, b"b", b"a", 1)
    pool.release([1, 0])
    assert pool.allocate(2) == [1, 2]
    assert (pool.num_evicted, pool.find(b"a"), pool.find(b"b"), pool.num_evictable) == (1, 0, None, 1)


def test_content_that_is_there_already_keeps_its_first_block() -> None:
    """A second block with the same content is not published; the first is found, and the second is free once it is let go."""
    pool = pool_of(Lru())
    pool.allocate(2)
    assert pool.publish(0, b"a", None, 0)
    assert not pool.publish(1, b"a", None, 0)
    assert pool.find(b"a") == 0
    pool.release([1])
    assert (pool.num_free, pool.num_evictable, pool.num_used) == (2, 0, 1)


def test_a_table_that_takes_a_cached_block_for_its_own_is_no_hit() -> None:
    """A candidate is withheld (its count and times stay as they are); a held one only gets one more holder."""
    notes = Notes()
    pool = pool_of(notes)
    pool.allocate(1)
    pool.publish(0, b"a", None, 0)
    pool.release([0])
    notes.told()
    pool.now = Now(3, 8.0)
    pool.adopt(0)
    assert notes.told() == [("withhold", 0, (1, 1, 2), (0.0, 0.0), 0)]
    assert (pool.blocks[0].ref_count, pool.num_evictable) == (1, 0)
    pool.adopt(0)
    assert notes.told() == []
    assert pool.blocks[0].ref_count == 2


def test_a_block_is_released_to_the_policy_by_its_last_holder_alone() -> None:
    notes = Notes()
    events: list[tuple[str, int]] = []
    pool = pool_of(notes, on_event=lambda kind, tier, block: events.append((kind, block.block_id)))
    pool.allocate(1)
    pool.publish(0, b"a", None, 0)
    pool.share(0)
    notes.told()
    pool.release([0], preempted=True)
    assert notes.told() == []
    pool.release([0], preempted=False)
    assert [(kind, *rest) for kind, _, _, _, _, *rest in notes.told()] == [("release", False)]
    assert events == [("allocate", 0), ("publish", 0), ("share", 0), ("unshare", 0), ("release", 0)]


def test_blocks_that_come_back_in_any_order_are_taken_lowest_first() -> None:
    pool = pool_of(Lru(), num_blocks=4)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.release([0, 3, 1])
    assert pool.allocate(2) == [0, 1]
    pool.release([0])
    pool.release([2])
    assert pool.allocate(3) == [0, 2, 3]


def test_a_pinned_block_is_used_and_no_candidate() -> None:
    class PinsZero(Lru):
        num_pinned = property(lambda self: int(0 in self.pinned))

        def __init__(self) -> None:
            super().__init__()
            self.pinned: set[int] = set()

        def is_pinned(self, block_id: int) -> bool:
            return block_id in self.pinned

        def release(self, block: BlockView, now: Now, preempted: bool) -> None:
            if block.block_id == 0:
                self.pinned.add(0)
            else:
                super().release(block, now, preempted)

    pool = pool_of(PinsZero(), num_blocks=3)
    pool.allocate(2)
    pool.publish(0, b"a", None, 0)
    pool.publish(1, b"b", b"a", 1)
    pool.release([1, 0])
    assert (pool.num_held, pool.num_pinned, pool.num_used, pool.num_evictable, pool.num_available) == (0, 1, 1, 1, 2)
    assert pool.num_evictable_of([0, 1, 2]) == 1
    assert pool.allocate(3) is None


def test_kept_blocks_that_are_dropped_count_as_evicted() -> None:
    """What a layout's slot keeps is neither used nor free."""
    pool = pool_of(Lru())
    pool.allocate(2)
    pool.keep([0, 1])
    assert (pool.num_free, pool.num_used, pool.num_evictable, pool.num_evicted) == (1, 0, 2, 0)
    pool.reuse([0])
    assert (pool.num_free, pool.num_used, pool.num_evictable, pool.num_evicted) == (1, 1, 1, 0)
    pool.drop([1])
    assert (pool.num_free, pool.num_used, pool.num_evictable, pool.num_evicted) == (2, 1, 0, 1)


def test_a_release_too_many_is_a_bug_that_is_named() -> None:
    pool = pool_of(Lru())
    pool.allocate(1)
    pool.release([0])
    with pytest.raises(AssertionError, match="block 0 of tier gpu released more often than held"):
        pool.release([0])
