"""`KVCacheManager` on pools of a few blocks, by hand: what a grown region leaves at both depths, what a slot keeps, what is offered."""

from __future__ import annotations

import pytest

from kvlab.cache.manager import KVCacheManager
from kvlab.engine.prefixes import Prefixes
from kvlab.engine.sequence import Sequence, SequenceGroup
from kvlab.policies.base import LayoutPolicy
from kvlab.policies.compression import Full
from kvlab.policies.eviction import Lru
from kvlab.policies.layout import ContiguousPow2, Paged, Ring
from kvlab.policies.prefix_cache import Hash, NoCache
from kvlab.types import Now, Request, SamplingParams

SIZE = 4


def manager(num_blocks: int, layout: LayoutPolicy, depth: int = 0) -> KVCacheManager:
    kv = KVCacheManager(num_blocks, 0, SIZE, Lru(), NoCache(), layout, Full(), 64, depth=depth)
    kv.set_now(Now(1, 0.0))
    return kv


def group_of(num_tokens: int, n: int = 1, seq_id: int = 0) -> SequenceGroup:
    sampling = SamplingParams(max_tokens=32, n=n, temperature=1.0)
    group = SequenceGroup(seq_id, Request(f"r{seq_id}", list(range(1, 1 + num_tokens)), sampling), 0, (), 32)
    group.seqs.append(Sequence(seq_id, group, 0, list(range(1, 1 + num_tokens))))
    return group


@pytest.mark.parametrize(("depth", "num_blocks", "fits"), [(0, 4, True), (1, 4, False), (1, 8, True)])
def test_a_region_grows_into_what_another_leaves_only_when_nobody_reads_that_any_more(depth: int, num_blocks: int, fits: bool) -> None:
    """Regions of one block, 0 and (set aside for a fork) 1, both outgrown. The first moves to 2 and 3; block 0 comes free, and the second
    may lie at 0 and 1. At depth 1 the plan still reads block 0: the second needs room of its own."""
    kv = manager(num_blocks, ContiguousPow2(), depth)
    group = group_of(4, n=2)
    assert kv.enter(group, [], 4)
    seq = group.seqs[0]
    seq.num_computed = 4
    assert (seq.table.block_ids, kv.spare_regions(group)) == ([0], [[1]])
    assert kv.can_grow([(seq, 5)]) == fits
    assert kv.grow([(seq, 5)]) == fits
    if not fits:
        assert (seq.table.block_ids, kv.spare_regions(group), kv.pending_copies) == ([0], [[1]], [])
        return
    assert (seq.table.block_ids, kv.pending_copies) == ([2, 3], [(0, 0, 2)])
    assert kv.spare_regions(group) == [[0, 1] if depth == 0 else [4, 5]]
    if depth:
        assert [kv.pool.blocks[b].ref_count for b in (0, 1)] == [1, 1]  # until step 1 has landed
        kv.parking.landed(1)
        assert [kv.pool.blocks[b].ref_count for b in (0, 1)] == [0, 0]


@pytest.mark.parametrize(("num_sent", "copies", "kept"), [(2, [], [0, 1]), (-1, [], []), (2, [(0, 5, 1)], [])])
def test_a_slot_keeps_what_lies_where_the_runner_knows_it(num_sent: int, copies: list[tuple[int, int, int]], kept: list[int]) -> None:
    """Six computed tokens in blocks 0 and 1. A table that the runner was not told, or a copy that is still to be done: nothing is kept."""
    kv = manager(8, Ring(n_parallel=2))
    group = group_of(6)
    assert kv.enter(group, [], 6)
    seq = group.seqs[0]
    seq.num_computed, seq.table.num_sent = 6, num_sent
    kv.pending_copies += copies
    kv.release(seq)
    assert kv.regions is not None
    assert kv.regions.kept_blocks() == kept
    assert (kv.pool.num_evictable, kv.pool.num_free, kv.pending_copies) == (len(kept), 8 - len(kept), [])


def test_a_slot_that_a_request_gets_is_not_emptied_for_it() -> None:
    """Six blocks, two slots that keep two and three. A request that shares the first one's beginning takes over its two blocks and needs
    two more: one is free, so the other slot is emptied, and not the one that it goes on after."""
    kv = manager(6, Ring(n_parallel=2))
    groups = []
    for seq_id, num_tokens in ((0, 8), (1, 12)):
        group = group_of(num_tokens, seq_id=seq_id)
        group.seqs[0].tokens = [100 * seq_id + i for i in range(num_tokens)]
        groups.append(group)
        assert kv.enter(group, [], num_tokens)
        group.seqs[0].num_computed, group.seqs[0].table.num_sent = num_tokens, 3
    for group in groups:
        kv.release(group.seqs[0])
    assert kv.regions is not None
    assert (kv.regions.kept_blocks(), kv.pool.num_free) == ([0, 1, 2, 3, 4], 1)
    new = group_of(16, seq_id=2)
    new.seqs[0].tokens = [*range(8), *range(500, 508)]
    match = kv.match_prefix(new.seqs[0], 15)
    assert (match.block_ids, match.num_tokens) == ([0, 1], 8)
    assert kv.enter(new, match.block_ids, 16, num_cached=8)
    assert new.seqs[0].table.block_ids[:2] == [0, 1]
    assert (kv.regions.kept_blocks(), kv.pool.num_evicted, kv.pool.num_free) == ([], 3, 2)


def test_keys_of_a_prompt_are_those_of_its_full_blocks_up_to_the_last_token_but_one() -> None:
    """Of 8 tokens the last is computed whatever is cached: one block of 4 can be found; of 9 tokens two."""
    kv = KVCacheManager(8, 0, SIZE, Lru(), Hash(), Paged(), Full(), 64)
    assert [len(Prefixes(kv).keys(group_of(num_tokens))) for num_tokens in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_a_fork_offers_no_block_again() -> None:
    """Block 1 holds what block 0 holds, so it was not published; then block 0 is evicted. What was offered once stays unnamed, for a fork
    too: nothing is computed anew that could be found again."""
    kv = KVCacheManager(3, 0, SIZE, Lru(), Hash(), Paged(), Full(), 64)
    groups = [group_of(4, seq_id=0), group_of(4, seq_id=1)]
    for group in groups:
        assert kv.enter(group, [], 4)
        group.seqs[0].num_computed = 4
        kv.publish(group.seqs[0])
    key = groups[0].seqs[0].keys[0]
    assert kv.pool.find(key) == 0
    kv.release(groups[0].seqs[0])
    assert kv.pool.allocate(2) == [0, 2]
    assert kv.pool.find(key) is None
    child = Sequence(2, groups[1], 1, list(range(1, 5)))
    kv.fork(groups[1].seqs[0], child, 4)
    child.num_computed = 4
    kv.publish(child)
    assert kv.pool.find(key) is None
