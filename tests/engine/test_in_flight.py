"""What a step in flight keeps (depth 1), by hand: blocks that are let go while it touches them, and tokens that are taken back."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import pytest
from engine_support import make_engine, policies, reference_outputs, request, serve

from kvlab.cache.manager import KVCacheManager
from kvlab.engine.flight import Flight
from kvlab.engine.runners.base import Ready
from kvlab.engine.sequence import Sequence, SequenceGroup
from kvlab.engine.steady import Lanes
from kvlab.policies.compression import Full
from kvlab.policies.eviction import Lru
from kvlab.policies.layout import Paged
from kvlab.policies.prefix_cache import Hash
from kvlab.types import LATE, Now, Outcome, Plan, Request, SamplingParams, ScheduledSeq

SIZE = 4


def manager(num_blocks: int = 6, step: int = 0) -> KVCacheManager:
    kv = KVCacheManager(num_blocks, 4, SIZE, Lru(), Hash(), Paged(), Full(), 64, depth=1)
    kv.set_now(Now(step, 0.0))
    return kv


def sequence(seq_id: int, num_tokens: int, num_prompt: int | None = None, max_tokens: int = 9) -> Sequence:
    """Of a request of its own, with tokens 1, 2, 3 ..., none computed."""
    prompt = list(range(1, 1 + (num_prompt or num_tokens)))
    group = SequenceGroup(seq_id, Request(f"r{seq_id}", prompt, SamplingParams(max_tokens=max_tokens)), 0, (), max_tokens)
    group.seqs.append(Sequence(seq_id, group, 0, list(range(1, 1 + num_tokens))))
    return group.seqs[0]


def entered(kv: KVCacheManager, seq: Sequence, num_computed: int) -> Sequence:
    assert kv.enter(seq.group, [], len(seq.tokens))
    seq.num_computed = num_computed
    return seq


def refs(kv: KVCacheManager) -> list[int]:
    return [block.ref_count for block in kv.pool.blocks]


# ------------------------------------------------------------------ blocks


def test_blocks_stay_held_until_the_step_that_computes_the_sequence_has_landed() -> None:
    kv = manager(step=5)
    seq = entered(kv, sequence(0, 8), 8)
    seq.flight = 5
    kv.release(seq)
    assert (refs(kv), len(kv.parking), kv.parking.num_landing) == ([1, 1, 0, 0, 0, 0], 1, 2)
    kv.parking.landed(4)
    assert refs(kv) == [1, 1, 0, 0, 0, 0]
    kv.parking.landed(5)
    assert (refs(kv), len(kv.parking), kv.pool.num_free) == ([0] * 6, 0, 6)


def test_between_steps_blocks_are_let_go_at_once() -> None:
    kv = manager(step=5)
    seq = entered(kv, sequence(0, 8), 8)
    kv.parking.landed(5)
    seq.flight = 5
    kv.release(seq)
    assert (refs(kv), len(kv.parking)) == ([0] * 6, 0)


def test_a_copys_source_stays_held_until_the_step_that_copies_has_landed() -> None:
    """Step 3 copies from block 0, whoever holds it. Of a sequence that no step computes, block 1 is free at once."""
    kv = manager(step=3)
    seq = entered(kv, sequence(0, 8), 8)
    kv.parking.note_copies(3, [0])
    assert (kv.parking.busy_until(seq, [1]), kv.parking.busy_until(seq, [0])) == (-1, 3)
    kv.let_go([1], seq)
    kv.let_go([0], seq)
    assert refs(kv) == [1, 0, 0, 0, 0, 0]
    kv.parking.landed(2)
    assert (refs(kv)[0], kv.parking.busy_until(seq, [0])) == (1, 3)
    kv.parking.landed(3)
    assert (refs(kv)[0], kv.parking.busy_until(seq, [0])) == (0, -1)


def test_a_source_of_a_copy_still_to_be_planned_waits_for_the_next_step() -> None:
    """Step 4 was the last to be decided; the copy from block 0 for sequence 7 goes with step 5. For sequence 7 itself nothing waits."""
    kv = manager(step=4)
    seq = entered(kv, sequence(0, 8), 8)
    kv.pending_copies.append((7, 0, 3))
    assert kv.parking.busy_until(sequence(7, 8), [0]) == -1
    assert kv.parking.busy_until(seq, [1]) == -1
    kv.let_go([0], seq)
    kv.parking.landed(4)
    assert refs(kv)[0] == 1
    kv.parking.landed(5)
    assert refs(kv)[0] == 0


def test_what_a_plan_reads_is_let_go_when_it_has_landed() -> None:
    kv = manager(step=2)
    entered(kv, sequence(0, 8), 8)
    kv.let_go_read([1])
    assert refs(kv)[1] == 1
    kv.parking.landed(1)
    assert refs(kv)[1] == 1
    kv.parking.landed(2)
    assert refs(kv)[1] == 0


def test_a_block_that_waits_for_a_step_is_released_as_what_it_was() -> None:
    """By a preemption: the eviction policy hears so when the block is let go at last."""
    heard: list[tuple[int, bool]] = []

    class Hears(Lru):
        def release(self, block, now, preempted):
            super().release(block, now, preempted)
            heard.append((block.block_id, preempted))

    kv = KVCacheManager(6, 4, SIZE, Hears(), Hash(), Paged(), Full(), 64, depth=1)
    kv.set_now(Now(1, 0.0))
    for seq_id, preempted in ((0, True), (1, False)):
        seq = sequence(seq_id, 8)
        seq.tokens[0] = 50 + seq_id  # contents of its own
        entered(kv, seq, 8)
        kv.publish(seq)
        seq.flight = 1
        kv.release(seq, preempted=preempted)
    assert heard == []
    kv.parking.landed(1)
    assert heard == [(1, True), (0, True), (3, False), (2, False)]


def forked(kv: KVCacheManager, num_tokens: int = 6) -> tuple[Sequence, Sequence]:
    """A sequence of six computed tokens in blocks 0 and 1, and a fork of it: both hold both blocks."""
    parent = entered(kv, sequence(0, num_tokens), num_tokens)
    child = Sequence(1, parent.group, 1, list(parent.tokens))
    kv.fork(parent, child, num_tokens)
    parent.group.seqs.append(child)
    return parent, child


def test_who_writes_first_leaves_a_shared_block_to_the_other_at_once() -> None:
    """Parent and child hold block 1, half full. The child copies it (to block 2); the parent goes on writing behind what is copied."""
    kv = manager(step=3)
    _, child = forked(kv)
    assert refs(kv) == [2, 2, 0, 0, 0, 0]
    assert kv.grow([(child, 7)])
    assert (refs(kv), kv.pending_copies) == ([2, 1, 1, 0, 0, 0], [(1, 1, 2)])


def test_the_last_holder_of_a_copys_source_keeps_it_until_the_copy_is_done() -> None:
    """Block 1 was filled and published by the parent, which has ended: the child alone holds it, and copies before it writes. The source
    is neither free nor evictable before step 3 has landed."""
    kv = manager(step=3)
    parent, child = forked(kv)
    parent.tokens += [7, 8]
    assert kv.grow([(parent, 8)])  # the parent copies: block 2 is its own now, block 1 the child's
    parent.num_computed = 8
    kv.take_copies()
    kv.parking.landed(3)
    child.table.num_full = 0
    kv.pool.publish(1, b"someone's", None, 1)
    child.table.tail_shared = True
    kv.set_now(Now(4, 0.0))
    assert kv.grow([(child, 7)])
    assert kv.pending_copies == [(1, 1, 3)]
    assert (refs(kv)[1], kv.pool.num_evictable) == (1, 0)
    kv.parking.landed(3)
    assert refs(kv)[1] == 1
    kv.parking.landed(4)
    assert (refs(kv)[1], kv.pool.num_evictable) == (0, 1)


def test_a_copys_source_that_only_a_step_in_flight_holds_besides_waits_for_the_copy() -> None:
    """The parent ends while step 3 computes it: its reference to block 1 is parked. The child copies block 1 in step 4, and so the block
    outlives step 3."""
    kv = manager(step=3)
    parent, child = forked(kv)
    parent.flight = 3
    kv.release(parent)
    assert kv.parking.num_landing == 0  # the child holds both blocks too: nothing comes free when step 3 lands
    kv.set_now(Now(4, 0.0))
    assert kv.grow([(child, 7)])
    assert kv.pending_copies == [(1, 1, 2)]
    assert refs(kv)[:3] == [2, 2, 1]
    kv.parking.landed(3)
    assert refs(kv)[:3] == [1, 1, 1]
    kv.parking.landed(4)
    assert refs(kv)[:3] == [1, 0, 1]


def test_a_parent_in_flight_keeps_the_block_that_it_shares_with_its_fork() -> None:
    """Step 2 computes the parent beyond what the fork shares: it reads block 1 until then, whatever becomes of the two."""
    kv = manager(step=2)
    parent = entered(kv, sequence(0, 6), 6)
    parent.flight = 2
    child = Sequence(1, parent.group, 1, list(parent.tokens))
    kv.fork(parent, child, 6)
    assert refs(kv)[:2] == [2, 3]
    kv.parking.landed(1)
    assert refs(kv)[:2] == [2, 3]
    kv.parking.landed(2)
    assert refs(kv)[:2] == [2, 2]


def test_a_swapped_groups_blocks_stay_until_the_plan_that_moves_them_has_landed() -> None:
    kv = manager(step=2)
    seq = entered(kv, sequence(0, 8), 8)
    transfers = kv.swapper.swap_out(seq.group)
    assert transfers is not None
    assert [(t.source, t.destination) for t in transfers] == [(0, 0), (1, 1)]
    assert (refs(kv)[:2], kv.cpu_pool.num_used) == ([1, 1], 2)
    kv.parking.landed(2)
    assert (refs(kv)[:2], kv.pool.num_free) == ([0, 0], 6)
    kv.set_now(Now(3, 0.0))
    assert kv.swapper.swap_in(seq.group, [(seq, 8)]) is not None
    assert (kv.pool.num_used, kv.cpu_pool.num_used) == (2, 2)  # the cpu blocks are read until step 3 has landed
    kv.parking.landed(3)
    assert kv.cpu_pool.num_used == 0


# ------------------------------------------------------------------ tokens


def flown(seq: Sequence, step: int, num_new: int, num_samples: int, others: Seqs[Sequence] = ()) -> Flight:
    """A flight that has taken off with `num_new` tokens of a sequence."""
    scheduled = (ScheduledSeq(seq.seq_id, seq.num_computed, num_new, num_samples),)
    plan = Plan(step, 0.0, scheduled, (tuple(seq.tokens[seq.num_computed :][:num_new]),))
    flight = Flight(plan, Ready(Outcome(step, ((),))), 0.0, 0.0)
    flight.take_off({s.seq_id: s for s in (seq, *others)}, Lanes(manager(), is_allowed=False))
    return flight


def test_a_token_in_flight_counts_as_computed_and_its_successor_is_late() -> None:
    seq = sequence(0, 4, num_prompt=3)
    seq.num_computed = 3
    flight = flown(seq, 5, 1, 1)
    assert (seq.tokens, seq.num_computed, seq.flight) == ([1, 2, 3, 4, LATE], 4, 5)
    flight.take_back()
    assert (seq.tokens, seq.num_computed) == ([1, 2, 3, 4], 3)


def test_a_recalled_step_leaves_its_last_token_to_be_computed() -> None:
    """Its sample is dropped: the token before it is computed again, so that the same one is sampled."""
    seq = sequence(0, 4, num_prompt=3)
    seq.num_computed = 3
    flight = flown(seq, 5, 1, 1)
    flight.recall(seq.group)
    assert (seq.tokens, seq.num_computed, flight.moves) == ([1, 2, 3, 4], 3, {})


def test_a_recalled_chunk_stays_computed() -> None:
    """Two of six prompt tokens were in flight: they will be there, and four are left."""
    seq = sequence(0, 6)
    flight = flown(seq, 5, 2, 0)
    flight.recall(seq.group)
    assert (seq.tokens, seq.num_computed) == ([1, 2, 3, 4, 5, 6], 2)


def test_a_recalled_parent_stops_a_token_short_of_where_others_branch_off() -> None:
    """A fork of five common tokens is made when the parent gets there, in a commit: the parent goes back to four."""
    seq = sequence(0, 8)
    other = Sequence(1, seq.group, 1, [1, 2, 3, 4, 5, 9])
    other.attach_to, other.attach_at = seq, 5
    seq.group.seqs.append(other)
    flight = flown(seq, 5, 6, 0, [other])
    flight.recall(seq.group)
    assert (len(seq.tokens), seq.num_computed) == (8, 4)


def test_the_last_token_by_length_has_no_successor() -> None:
    """Of at most two output tokens one is there: the one in flight is the last, and nothing follows it."""
    for max_tokens, tokens in ((2, [1, 2, 3, 4]), (3, [1, 2, 3, 4, LATE])):
        seq = sequence(0, 4, num_prompt=3, max_tokens=max_tokens)
        seq.num_computed = 3
        flown(seq, 5, 1, 1)
        assert seq.tokens == tokens


def test_a_sequence_is_in_flight_until_the_latest_step_that_has_it_lands() -> None:
    seq = sequence(0, 4, num_prompt=3)
    seq.num_computed = 3
    first = flown(seq, 5, 1, 1)
    second = flown(seq, 6, 1, 1)
    assert seq.tokens == [1, 2, 3, 4, LATE, LATE]
    second.take_back()
    first.take_back()
    first.land()
    assert (seq.tokens, seq.num_computed, seq.flight) == ([1, 2, 3, 4], 3, 6)
    second.take_off_again({})  # it ended with the outcome of step 5
    assert (seq.tokens, second.moves) == ([1, 2, 3, 4], {})


# ------------------------------------------------------------------ requests


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("stops", [True, False])
def test_a_request_that_fills_the_pool_ends_by_its_token_in_flight_if_that_ends_it(depth: int, stops: bool) -> None:
    """Two blocks of 4, a prompt of 7: the first output takes the last slot, the second would need none, a third one more block. If the
    second ends it, it has stopped; else it ends for want of blocks, with two tokens all the same."""
    full = reference_outputs([request("a", range(1, 8), 3)])["a"][0][0]
    engine, log = make_engine(2, 4, policies(prefix_cache="none"), depth=depth)
    serve(engine, [request("a", range(1, 8), 3, stop_token_ids=(full[1],) if stops else ())])
    assert full[0] != full[1]
    assert log.outputs == {"a": ((full[:2], "stop" if stops else "kv_capacity"),)}
