"""Published eviction policies: the optimum bounds them all, parts of them by hand, held blocks, and the cost of a victim."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_policies_eviction import cached, make_pool, run_prompt

from kvlab.cache.pool import BlockPool
from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.policies.base import EvictionPolicy
from kvlab.policies.eviction import Arc, Belady, Clock, Fifo, Gdsf, Lfu, Lirs, Lru, Mru, S3Fifo, Sieve, Slru, TwoQ, WTinyLfu
from kvlab.policies.eviction._queues import FifoQueue
from kvlab.policies.eviction._sketch import FrequencySketch
from kvlab.policies.registry import list_policies
from kvlab.replay import AccessTrace, EngineOptions, Served, replay
from kvlab.replay.access import replay_access, replay_events
from kvlab.types import Now, Request, SamplingParams, UserError

CLASSES = {row.name: row.cls for row in list_policies("eviction")}


def evicted(policy: EvictionPolicy | type[EvictionPolicy], accesses: str, capacity: int) -> str:
    """Ids evicted, in order, when each letter is accessed as a request of its own."""
    return b"".join(replay([[letter] for letter in accesses], policy, capacity).evicted).decode()


# ------------------------------------------------------------------------------------------------------------- the optimum


@settings(deadline=None, max_examples=40)
@example(requests=[[0, 1, 2], [2, 1, 0]], capacity=2)  # ids that continue each other in a circle: no leaf is left
@given(requests=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=60), capacity=st.integers(1, 9))
def test_no_policy_has_more_hits_than_belady(requests: list[list[int]], capacity: int) -> None:
    best = replay(requests, Belady, capacity).object_hits
    assert [name for name, cls in CLASSES.items() if replay(requests, cls, capacity).object_hits > best] == []


def optimal_hits(accesses: tuple[int, ...], capacity: int, cache: frozenset[int] = frozenset()) -> int:
    """Most hits of any sequence of evictions, by trying all."""
    if not accesses:
        return 0
    first, rest = accesses[0], accesses[1:]
    if first in cache:
        return 1 + optimal_hits(rest, capacity, cache)
    if len(cache) < capacity:
        return optimal_hits(rest, capacity, cache | {first})
    return max(optimal_hits(rest, capacity, cache - {gone} | {first}) for gone in cache)


@settings(deadline=None, max_examples=60)
@given(accesses=st.lists(st.integers(0, 4), min_size=1, max_size=11), capacity=st.integers(1, 3))
def test_belady_is_the_optimum(accesses: list[int], capacity: int) -> None:
    assert replay([[one] for one in accesses], Belady, capacity).object_hits == optimal_hits(tuple(accesses), capacity)
    assert replay([accesses], Belady, capacity).object_hits == optimal_hits(tuple(accesses), capacity)


def test_an_engine_has_no_future_to_tell() -> None:
    message = "must know all accesses in advance, which an engine does not: use it in kvlab.replay"
    with pytest.raises(UserError, match=message):
        PolicySet(eviction=Belady()).check(EngineConfig(num_blocks=10))
    with pytest.raises(UserError, match=message):
        make_pool(Belady(), 3)


def test_belady_with_semantics_engine() -> None:
    """Blocks of one token, 4 of them: 1 2 and 3 4 fill them. 5 6 take 3 and 4, which do not come back; LRU gives 2 and 1. Of the last
    prompt at most one token is found, since its last one has to be computed."""
    prompts = [[1, 2], [3, 4], [5, 6], [1, 2]]
    served = [Served(Request(f"r{i}", p, SamplingParams(max_tokens=1, ignore_eos=True)), [9]) for i, p in enumerate(prompts)]
    options = EngineOptions(block_size=1)
    hits = {cls: replay(served, cls, 4, "engine", options=options).prefix_hits_per_request.tolist() for cls in (Belady, Lru)}
    assert hits == {Belady: [0, 0, 0, 1], Lru: [0, 0, 0, 0]}


# ----------------------------------------------------------------------------------------------------------- parts by hand


def test_arc_moves_its_target_by_what_the_lists_lost() -> None:
    """c = 4. A..D hit: all in T2. E: |T1| = 0, A goes to B2. F: T1 = E > p = 0, E goes to B1. E: in B1, p = 0 + max(1, 1/1) = 1; T1 = F
    is not larger, so T2 gives B (to B2); E to T2. A: in B2 (A, B), p = 1 - max(1, 0/2) = 0; T1 = F is larger: F goes; A to T2."""
    assert evicted(Arc, "ABCDABCDEFEA", 4) == "AEBF"


def test_arc_a_block_from_b2_takes_from_t1_at_the_tie() -> None:
    """c = 3. B is hit: T2 = B. D: T1 = A C > p = 0: A goes to B1. A: p = 1, T1 = C D is larger: C goes to B1; T2 = B A. C: p = 2, T1 = D
    is not larger: T2 gives B, to B2; T2 = A C. B: in B2, p = 2 - max(1, 0/1) = 1 = |T1|: for a block of B2 T1 gives, D goes. (For a new
    one T2 would give A.)"""
    assert evicted(Arc, "ABBCDACB", 3) == "ACBD"
    assert evicted(Arc, "ABBCDACE", 3) == "ACBA"


def test_s3fifo_promotes_what_was_hit_twice_and_what_a_ghost_remembers() -> None:
    """Capacity 10: one in the small queue. A enters it, B..J the main one (nothing evicted yet). A is hit twice, B once. K: A is promoted
    behind J; the small queue is empty, so the main one gives C, after B spent its hit. L: K goes, a ghost. K: L goes; K enters the main
    queue. M: the small queue is empty: D goes."""
    assert evicted(S3Fifo, "ABCDEFGHIJAABKLKM", 10) == "CKLD"
    assert evicted(S3Fifo(promote_at=3), "ABCDEFGHIJAABKLKM", 10) == "AKLC"


def test_two_q_asks_what_it_remembers_before_it_forgets() -> None:
    """c = 4: A1in above 1 gives, A1out remembers 2. A..D; E, F, G put A, B, C out; B and C are remembered. B: D goes, which makes A1out
    forget B, but only after B was found there: B is in Am, and stays while H to K put out E to H. Unremembered it is in A1in, behind G."""
    assert evicted(TwoQ, "ABCDEFGBHIJK", 4) == "ABCDEFGH"
    assert evicted(TwoQ(a1out=0), "ABCDEFGBHIJK", 4) == "ABCDEFGB"


def test_gdsf_counts_the_tokens_before_a_block_where_it_is_told_to() -> None:
    """A has a hit: 2. B C D is one prompt: worth 1, 2, 3 with cost=prefix, 1 each with cost=block. E: B goes, the age is 1, E is worth 2.
    F: with cost=prefix A, C and E are worth 2, A was used longest ago; with cost=block C is worth 1."""
    requests = [["A"], ["A"], ["B", "C", "D"], ["E"], ["F"]]
    assert replay(requests, Gdsf(cost="prefix"), 4).evicted == (b"B", b"A")
    assert replay(requests, Gdsf(), 4).evicted == (b"B", b"C")


def test_gdsf_ages_where_lfu_does_not() -> None:
    """A has five hits. B..: each newcomer is worth age + 1, and the age grows by one with each generation: A (6) goes in the end."""
    assert "A" in evicted(Gdsf, "AAAAAA" + "BCDEFGHIJKLM", 2)
    assert "A" not in evicted(Lfu, "AAAAAA" + "BCDEFGHIJKLM", 2)


def test_the_sketch_counts_to_15_and_halves() -> None:
    sketch = FrequencySketch(capacity=64, sample=100)
    often, thrice, never = (sketch.places(content) for content in (b"often", b"thrice", b"never"))
    for _ in range(20):
        sketch.add(often)
    for _ in range(3):
        sketch.add(thrice)
    assert (sketch.count(often), sketch.count(thrice), sketch.count(never)) == (15, 3, 0)
    for number in range(77):  # the 100th use halves all
        sketch.add(sketch.places(b"%d" % number))
    assert (sketch.count(often), sketch.count(thrice)) == (7, 1)


# ---------------------------------------------------------------------------------------------------------- lru in one go


@settings(deadline=None, max_examples=200)
@given(
    requests=st.one_of([st.lists(st.lists(ids, max_size=5), min_size=1, max_size=40)
                        for ids in (st.integers(-3, 9), st.sampled_from(["a", "b\nc", "", "d", "e"]))]),
    capacity=st.integers(1, 9),
)  # fmt: skip
def test_lru_in_one_go_decides_as_by_events(requests: list[list[int | str]], capacity: int) -> None:
    trace = AccessTrace("requests", requests, [0.0] * len(requests))
    at_once, by_events = replay_access(trace, Lru(), capacity), replay_events(trace, Lru(), capacity)
    assert [part.tolist() for part in at_once[:2]] == [part.tolist() for part in by_events[:2]]
    assert at_once[2] == by_events[2]


def test_a_changed_lru_is_not_replayed_as_lru() -> None:
    """A subclass that gives up the most recently used: its own victims."""

    class Contrary(Lru):
        def victim(self, now: Now) -> int:
            return next(reversed(self._order))

    assert (evicted(Contrary, "ABCAD", 3), evicted(Lru, "ABCAD", 3)) == ("A", "B")


# ------------------------------------------------------------------------------------------------------------- held blocks


def hold(pool: BlockPool, name: str) -> None:
    """A request that hits one cached block and goes on running."""
    block_id = pool.find(name.encode())
    assert block_id is not None
    pool.hit([block_id])


def let_go(pool: BlockPool, name: str) -> None:
    block_id = pool.find(name.encode())
    assert block_id is not None
    pool.release([block_id])


@pytest.mark.parametrize(("policy", "after"), [(Sieve, ["acx", "axy", "ayz"]), (Clock, ["acx", "axy", "ayz"])])
def test_the_hand_passes_a_held_block_and_leaves_its_bit(policy: Callable[[], EvictionPolicy], after: list[str]) -> None:
    """a, b, c; a is hit and held. x: b goes, y: c goes; let go now, a has its bit still, though the hand came by: z takes x."""
    pool = make_pool(policy(), 3)
    for name in "abc":
        run_prompt(pool, name)
    hold(pool, "a")
    for name, expected in zip("xy", after, strict=False):
        run_prompt(pool, name)
        assert cached(pool) == expected
    let_go(pool, "a")
    run_prompt(pool, "z")
    assert cached(pool) == after[2]


def test_a_fifo_queue_gives_the_oldest_that_is_ready() -> None:
    """7 is passed over while it is held and keeps its place; the queue may be compacted meanwhile."""
    queue = FifoQueue()
    for block_id in (7, 8, 9):
        queue.push(block_id, ready=True)
    queue.set_held(7)
    assert queue.oldest() == 8
    for _ in range(100):
        queue.remove(8)
        queue.push(8, ready=True)
        queue.remove(9)
        queue.push(9, ready=True)
    assert (queue.oldest(), len(queue)) == (8, 3)
    queue.set_ready(7)
    assert queue.oldest() == 7
    for block_id in (7, 8, 9):
        queue.set_held(block_id)
    assert queue.oldest() == -1


QUEUES: list[Callable[[], EvictionPolicy]] = [Arc, Clock, Lirs, S3Fifo, Sieve, Slru, TwoQ, WTinyLfu]


@pytest.mark.parametrize("policy", QUEUES)
def test_a_victim_is_the_same_when_asked_again(policy: Callable[[], EvictionPolicy]) -> None:
    """Also after others were inserted and held meanwhile; and being asked three times changes no later decision."""

    class Asks:
        """Asks three times for each victim."""

        def __init__(self, inner: EvictionPolicy, times: int) -> None:
            self.victim_of, self.times = inner.victim, times

        def __call__(self, now: Now) -> int:
            victims = [self.victim_of(now) for _ in range(self.times)]
            assert len(set(victims)) == 1
            return victims[0]

    results = []
    for times in (1, 3):
        one = policy()
        one.victim = Asks(one, times)  # type: ignore[method-assign]
        pool = make_pool(one, 12)
        for number in range(400):
            family = "abcdefghijklmnop"[(number * number + number // 3) % 16]
            if number % 5 == 4 and pool.find(family.encode()) is not None:
                hold(pool, family)
                run_prompt(pool, "q")
                let_go(pool, family)
            else:
                run_prompt(pool, family)
        results.append((cached(pool), pool.num_evicted))
    assert results[0] == results[1]
    assert results[0][1] > 20


@pytest.mark.parametrize("policy", [*QUEUES, Fifo, Gdsf, Lru, Mru])
def test_a_victim_costs_no_walk_over_held_blocks(policy: Callable[[], EvictionPolicy]) -> None:
    """40,000 blocks are held, 50 are not: 3,000 evictions. A walk over those held would be 120 million steps, ten seconds at least."""
    pool = make_pool(policy(), 40_050)
    held = pool.allocate(40_000)
    assert held is not None
    for block_id in held:
        pool.publish(block_id, b"held %d" % block_id, None, 0)
    start = time.process_time()
    for number in range(3050):
        run_prompt(pool, chr(0x4E00 + number))
    assert time.process_time() - start < 3.0
    assert pool.num_evicted == 3000


# -------------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Slru(protected=1), r"Slru\.protected = 1 is not allowed: a share in \(0, 1\)"),
        (lambda: TwoQ(a1in=0), r"TwoQ\.a1in = 0 "),
        (lambda: TwoQ(a1out=-0.5), r"TwoQ\.a1out = -0\.5 is not allowed: a number of at least 0"),
        (lambda: S3Fifo(small=1.5), r"S3Fifo\.small = 1\.5 "),
        (lambda: S3Fifo(ghost=float("nan")), r"S3Fifo\.ghost = nan "),
        (lambda: S3Fifo(promote_at=4), r"S3Fifo\.promote_at = 4 is not allowed: 1, 2 or 3 hits"),
        (lambda: S3Fifo(promote_at=True), r"S3Fifo\.promote_at = True "),
        (lambda: Lirs(hir=-1), r"Lirs\.hir = -1 "),
        (lambda: Lirs(ghosts=float("inf")), r"Lirs\.ghosts = inf "),
        (lambda: WTinyLfu(window="1"), r"WTinyLfu\.window = '1' "),  # type: ignore[arg-type]
        (lambda: WTinyLfu(protected=0.0), r"WTinyLfu\.protected = 0\.0 "),
        (lambda: WTinyLfu(sample=0.5), r"WTinyLfu\.sample = 0\.5 "),
        (lambda: Gdsf(cost="bytes"), r"Gdsf\.cost = 'bytes' is not allowed: \"block\" or \"prefix\""),
    ],
)
def test_parameters_out_of_range_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("policy", QUEUES)
@pytest.mark.parametrize("capacity", [1, 2])
def test_the_smallest_pools_work(policy: type[EvictionPolicy], capacity: int) -> None:
    """Every second access is a hit with one block already."""
    result = replay([[name] for name in "AABBCCAABBCC"], policy, capacity)
    assert result.object_hits >= 6
    assert len(result.evicted) == 12 - result.object_hits - capacity
