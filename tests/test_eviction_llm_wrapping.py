"""Policies around others: leaves first, the queue's needs, pins. Around every inner policy, and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from eviction_stage import Stage, evicted

from kvlab.building import build
from kvlab.composition import compose
from kvlab.config import to_plain
from kvlab.policies.base import EvictionPolicy, KeyEviction
from kvlab.policies.eviction import Arc, Belady, Fifo, LeafFirst, Lfu, Lru, Pinned, QueueInformed, Sieve, Slru, TwoQ
from kvlab.policies.registry import by_name, list_policies
from kvlab.replay import replay
from kvlab.testing import check_policy
from kvlab.types import Now, UserError

WRAPPERS = ["leaf_first", "queue_informed", "pinned"]
ALL = [row.name for row in list_policies("eviction")]
INNER = [name for name in ALL if name not in WRAPPERS]


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("inner", ALL)
def test_around_any_policy_the_contract_holds(wrapper: str, inner: str) -> None:
    """Pins around pins are refused: who gives one up would not know whether the inner policy takes it for one of its own."""
    if wrapper == inner == "pinned":
        for policy in (Pinned(), LeafFirst(Pinned(mode="soft"))):
            with pytest.raises(UserError, match="without pins of its own"):
                Pinned(policy)
        return
    check_policy(lambda: by_name("eviction", wrapper, inner=inner), num_sequences=4)


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_three_deep_the_contract_holds(mode: str) -> None:
    check_policy(lambda: LeafFirst(QueueInformed(Pinned(Sieve(), mode, min_hits=0, max_fraction=0.5))))
    check_policy(lambda: QueueInformed(LeafFirst(Pinned(Lfu(), mode, min_hits=0, max_fraction=0.5))))
    check_policy(lambda: Pinned(QueueInformed(LeafFirst(Lfu())), mode, min_hits=0, max_fraction=0.5))
    check_policy(lambda: QueueInformed(LeafFirst(Arc()), num_waiting=2))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("inner", [name for name in INNER if name != "belady"])
def test_with_nothing_to_do_the_inner_policy_decides_alone(wrapper: str, inner: str) -> None:
    """No queue; no block deserves a pin; every request is one block, so all are leaves: the same blocks go as without the wrapper."""
    draw = Random(4)
    requests = [chr(1000 + min(draw.randint(0, 30), draw.randint(0, 30))) for _ in range(500)]
    parameters = {"min_hits": 10_000} if wrapper == "pinned" else {}
    alone = Stage(by_name("eviction", inner), 12).serve(*requests)
    assert Stage(by_name("eviction", wrapper, inner=inner, **parameters), 12).serve(*requests) == alone
    assert len(alone) > 100


# --------------------------------------------------------------------------- leaves


def test_leaves_go_in_the_order_of_the_inner_policy() -> None:
    """FIFO alone takes the head a. Among the leaves c came before x, and then b and a are leaves that came before x and y."""
    assert evicted(Fifo(), 4, "abc x abc y z w") == "abc"
    assert evicted(LeafFirst(Fifo()), 4, "abc x abc y z w") == "cba"


def test_below_the_choice_of_a_policy_with_lists_the_child_let_go_longest_ago_goes() -> None:
    """2Q's queue begins with a, which abc and ad continue: b was let go before d, and c is below b. Then b, then d, then a itself."""
    assert evicted(TwoQ(), 4, "abc ad w x y z") == "abcd"
    assert evicted(LeafFirst(TwoQ()), 4, "abc ad w x y z") == "cbda"


def brute_force_leaves(stage: Stage) -> dict[int, int]:
    """block id -> candidates that continue it, of all candidates."""
    blocks = [block for block in stage.pool.blocks if block.content and not block.ref_count]
    return {block.block_id: sum(other.parent == block.content for other in blocks) for block in blocks}


def play_overlapping(stage: Stage, draw: Random, num_steps: int) -> int:
    """Requests that overlap, compute the same content twice, are preempted; after each step the victim is a leaf. How often one was
    asked for while some candidate was none."""
    policy, held, num_asked = stage.pool.eviction, list[list[int]](), 0
    assert policy is not None
    for _ in range(num_steps):
        if draw.random() < 0.55:
            family, length = draw.randint(0, 6), draw.randint(1, 6)
            names = [f"{family}.{depth}.{draw.randint(0, 1) if depth > 2 else 0}" for depth in range(length)]
            taken = acquire(stage, names, draw)
            if taken:
                held.append(taken)
        elif held:
            stage.pool.release(reversed(held.pop(draw.randrange(len(held)))), preempted=draw.random() < 0.3)
        leaves = brute_force_leaves(stage)
        if leaves:
            assert leaves[policy.victim(stage.pool.now)] == 0
            num_asked += any(leaves.values())
    for blocks in held:
        stage.let_go(blocks)
    while stage.pool.num_evictable:
        assert brute_force_leaves(stage)[policy.victim(stage.pool.now)] == 0
        before = stage.pool.num_evictable
        taken = stage.pool.allocate(stage.pool.num_free + 1)
        assert taken is not None
        stage.let_go(taken)
        assert stage.pool.num_evictable == before - 1
    return num_asked


def acquire(stage: Stage, names: Sequence[str], draw: Random) -> list[int]:
    """Hold a prompt's blocks; sometimes its head is looked up too late, so that it computes content that is cached."""
    pool, hits = stage.pool, list[int]()
    contents = ["/".join(names[: depth + 1]).encode() for depth in range(len(names))]
    if draw.random() < 0.7:
        for content in contents:
            block_id = pool.find(content)
            if block_id is None:
                break
            hits.append(block_id)
    if len(names) - len(hits) > pool.num_available - pool.num_evictable_of(hits):
        return []
    pool.hit(hits)
    fresh = pool.allocate(len(names) - len(hits))
    assert fresh is not None
    for depth, block_id in enumerate(fresh, len(hits)):
        pool.publish(block_id, contents[depth], contents[depth - 1] if depth else None, depth)
    return hits + fresh


@pytest.mark.parametrize("inner", [name for name in INNER if name != "belady"])
def test_the_victim_is_always_a_leaf(inner: str) -> None:
    """Also where content is computed twice, and a child is held while its parent is not."""
    num_asked = 0
    for seed in range(6):
        policy = by_name("eviction", "leaf_first", inner=inner)
        num_asked += play_overlapping(Stage(policy, 6 + 5 * seed), Random(seed), 300)
    assert num_asked > 500


@pytest.mark.parametrize("inner", ["lru", "lfu", "fifo", "length_aware", "gdsf", "cost_aware"])
def test_a_policy_that_sorts_takes_the_best_of_the_leaves(inner: str) -> None:
    """Against a copy of the inner policy that hears everything, whose keys are compared over all leaves."""
    draw = Random(7)
    by_key = _LruByKey() if inner == "lru" else by_name("eviction", inner)
    assert isinstance(by_key, KeyEviction)
    policy = _Both(LeafFirst(by_name("eviction", inner)), by_key)
    stage = Stage(policy, 24)
    num_compared = 0
    for _ in range(600):
        family, length = draw.randint(0, 8), draw.randint(1, 6)
        blocks = acquire(stage, [f"{family}.{depth}.{draw.randint(0, 1) if depth > 2 else 0}" for depth in range(length)], Random(1))
        stage.let_go(blocks)
        leaves = [block_id for block_id, num_children in brute_force_leaves(stage).items() if not num_children]
        best = min(leaves, key=lambda block_id: by_key.key(stage.pool.blocks[block_id]))
        assert policy.victim(Now(0, 0.0)) == best
        num_compared += len(leaves) > 2
    assert num_compared > 300


class _LruByKey(KeyEviction):
    def key(self, block: object) -> tuple[float, ...]:
        return (block.used_tick,)  # type: ignore[attr-defined]


class _Both(EvictionPolicy):
    """Two policies that hear the same; the first decides."""

    def __init__(self, first: EvictionPolicy, second: EvictionPolicy) -> None:
        self.both = (first, second)

    def insert(self, *event: object) -> None:
        for policy in self.both:
            policy.insert(*event)  # type: ignore[arg-type]

    def hit(self, *event: object) -> None:
        for policy in self.both:
            policy.hit(*event)  # type: ignore[arg-type]

    def release(self, *event: object) -> None:
        for policy in self.both:
            policy.release(*event)  # type: ignore[arg-type]

    def evict(self, *event: object) -> None:
        for policy in self.both:
            policy.evict(*event)  # type: ignore[arg-type]

    def victim(self, now: Now) -> int:
        return self.both[0].victim(now)


def test_belady_limited_to_leaves_by_hand() -> None:
    """Capacity 3, f comes: a is used farthest in the future, but b continues it. Among the leaves b (5) is needed later than e (3)."""
    trace = [list("ab"), list("e"), list("f"), list("e"), list("f"), list("b"), list("a")]
    assert replay(trace, Belady(), 3).evicted[:1] == (b"a",)
    assert replay(trace, LeafFirst(Belady()), 3).evicted[:1] == (b"b",)


@pytest.mark.parametrize("inner", [name for name in INNER if name != "belady"])
def test_no_policy_limited_to_leaves_beats_belady(inner: str) -> None:
    """Semantics access; Belady without the limit bounds both."""
    draw = Random(11)
    trace = [[100 * draw.randint(0, 9) + depth for depth in range(draw.randint(1, 6))] for _ in range(500)]
    for capacity in (5, 13, 30):
        best = replay(trace, Belady(), capacity).object_hits
        assert replay(trace, by_name("eviction", "leaf_first", inner=inner), capacity).object_hits <= best
        assert replay(trace, LeafFirst(Belady()), capacity).object_hits <= best


# ----------------------------------------------------------------------- the queue


def tell(stage: Stage, *waiting: str) -> None:
    """These requests wait, from the head of the queue."""
    policy = stage.pool.eviction
    assert policy is not None
    policy.waiting([[name.encode() for name in names] for names in waiting[: policy.queue_depth]], stage.pool.now)


def test_what_the_queue_needs_is_spared_and_the_inner_policy_decides_among_the_rest() -> None:
    """LFU: of a (2 hits), b (1), c (0), d (0) it would take c. c is needed: d goes. Nobody waits: c, though newer blocks are there."""
    stage = Stage(QueueInformed(Lfu()), 4)
    stage.serve("a", "a", "a", "b", "b", "c", "d")
    tell(stage, "c")
    assert stage.serve("x") == "d"
    tell(stage)
    assert stage.serve("y") == "dc"


def test_when_everything_is_needed_the_last_in_the_queue_loses_its_tail() -> None:
    """ab waits before cde; d and e are the last to be needed. d is not let go before it is taken."""
    stage = Stage(QueueInformed(), 5)
    stage.serve("ab", "cde")
    tell(stage, "ab", "cde")
    assert stage.serve("x") == "e"
    tell(stage, "x", "ab", "cde")
    assert stage.serve("yz") == "edc"
    tell(stage, "ab", "x")
    assert stage.serve("uv") == "edczy"  # x, y, z are let go; only y and z are not needed
    assert sorted(stage.pool.by_content) == [b"a", b"b", b"u", b"v", b"x"]


def test_only_the_first_of_the_queue_are_looked_at() -> None:
    stage = Stage(QueueInformed(num_waiting=1), 2)
    stage.serve("a", "b")
    tell(stage, "x", "a")
    assert stage.serve("c") == "a"


def test_a_spared_block_keeps_its_age() -> None:
    """a is spared while it is the oldest; when it is not needed any more, it still is the oldest."""
    stage = Stage(QueueInformed(), 3)
    stage.serve("a", "b", "c")
    tell(stage, "a")
    assert stage.serve("d") == "b"
    tell(stage)
    assert stage.serve("e") == "ba"


def test_the_inner_policy_hears_of_the_queue_as_far_as_it_asks() -> None:
    """The outer looks at one waiting request, the inner at two."""
    policy = QueueInformed(QueueInformed(num_waiting=2), num_waiting=1)
    assert policy.queue_depth == 2
    stage = Stage(policy, 3)
    stage.serve("a", "b", "c")
    tell(stage, "a", "b")
    assert stage.serve("d") == "c"


# ---------------------------------------------------------------------------- pins


def test_a_hard_pin_is_never_evicted_and_in_use() -> None:
    """Blocks of 16, the first 32 tokens, a quarter of 8: a and b are pinned once they were hit. c, at 32, is not."""
    stage = Stage(Pinned(depth_tokens=32), 8)
    stage.serve("abc", "abc", "d", "e", "f", "g", "h")
    pool = stage.pool
    assert (pool.num_free, pool.num_evictable, pool.num_held, pool.num_pinned, pool.num_used) == (0, 6, 0, 2, 2)
    assert pool.allocate(7) is None
    assert stage.serve("ijklmn") == "cdefgh"
    assert pool.num_evictable_of([0, 1, 2]) == 1
    assert pool.give_up_pins()
    assert not pool.give_up_pins()
    assert (pool.num_evictable, pool.num_pinned) == (8, 0)
    assert stage.serve("opqrstuv") == "cdefgh" + "ba" + "nmlkji"  # b and a, let go before the others, are the oldest now


def test_a_pin_returns_when_it_is_hit_again() -> None:
    stage = Stage(Pinned(), 4)
    stage.serve("a", "a")
    assert stage.pool.give_up_pins()
    stage.serve("a")
    assert stage.pool.num_pinned == 1
    assert stage.serve("wxy") == ""
    assert stage.serve("uvt") == "yxw"


def test_a_held_block_is_not_pinned_and_reset_forgets_pins() -> None:
    stage = Stage(Pinned(), 8)
    stage.serve("ab", "ab")
    assert stage.pool.num_pinned == 2
    held = stage.hold("a")
    assert (stage.pool.num_pinned, stage.pool.num_held, stage.pool.num_used) == (1, 1, 2)
    assert not stage.pool.reset_cache()
    stage.let_go(held)
    assert stage.pool.reset_cache()
    assert (stage.pool.num_free, stage.pool.num_pinned) == (8, 0)
    assert stage.gone == "ab"


def test_more_hits_then_the_shallower_place_earn_the_pin() -> None:
    """One pin. b, deeper, is let go before a and loses it to a; c with two hits takes it from a, which is the oldest then."""
    stage = Stage(Pinned(), 4)
    stage.serve("ab", "ab")
    assert [stage.pool.find(b"a")] == [block.block_id for block in stage.pool.blocks if stage.pool.eviction.is_pinned(block.block_id)]  # type: ignore[union-attr]
    stage.serve("c", "c", "c", "d")
    assert stage.pool.num_pinned == 1
    assert stage.serve("xyz") == "bad"


def test_soft_pins_go_last_fewest_hits_first_then_the_deepest() -> None:
    """a, b once hit, c twice; three of four may be pinned. d goes first, then b (deeper than a), then a."""
    policy = Pinned(mode="soft", max_fraction=0.75)
    stage = Stage(policy, 4)
    stage.serve("ab", "ab", "c", "c", "c", "d")
    assert (policy.num_pinned, stage.pool.num_evictable) == (0, 4)
    assert not stage.pool.give_up_pins()
    assert stage.serve("wxy") == "dba"


def test_pins_need_a_pool_that_has_room_for_them() -> None:
    """A quarter of 3 blocks is none."""
    assert evicted(Pinned(), 3, "a a b c d") == evicted(Lru(), 3, "a a b c d") == "a"


@pytest.mark.parametrize("inner", ["lru", "fifo", "sieve", "arc", "lirs"])
def test_where_ids_go_round_in_a_circle_somebody_goes(inner: str) -> None:
    """2 after 1 and 1 after 2, both in a cache of 2: there is no leaf, in the eyes of any inner policy. The one let go first goes."""
    result = replay([[0, 1, 2], [2, 1, 0]], by_name("eviction", "leaf_first", inner=inner), 2)
    assert result.object_hits == 1
    rng = Random(20261130)
    for _ in range(60):
        requests = [[rng.randrange(8) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 40))]
        result = replay(requests, by_name("eviction", "leaf_first", inner=inner), rng.randint(1, 6))
        assert result.object_hits + len(result.evicted) <= sum(map(len, requests))


def test_a_leaf_policy_passes_over_pinned_children() -> None:
    """The inner SIEVE stands at a, hit once; b, pinned, is no way down."""
    policy = LeafFirst(Pinned(Slru(), min_hits=1, max_fraction=0.5))
    stage = Stage(policy, 4)
    stage.serve("ab", "ab", "a", "c", "d")
    assert {stage.pool.blocks[b].content for b in range(4) if policy.is_pinned(b)} == {b"a", b"b"}
    assert stage.serve("xy") == "cd"


# ----------------------------------------------------------------- made by name, in yaml


def test_an_inner_policy_by_name_object_and_yaml() -> None:
    assert type(by_name("eviction", "leaf_first", inner="sieve").inner) is Sieve
    inner = Lfu()
    assert by_name("eviction", "pinned", inner=inner).inner is inner
    policy = build(to_plain(compose("eviction=leaf_first", "eviction@eviction.inner=sieve"))["eviction"])
    assert (type(policy), type(policy.inner)) == (LeafFirst, Sieve)
    policy = build(to_plain(compose("eviction=pinned", "eviction@eviction.inner=queue_informed", "eviction.inner.num_waiting=3",
                                    "eviction@eviction.inner.inner=s3fifo", "eviction.inner.inner.small=0.3"))["eviction"])  # fmt: skip
    assert (policy.inner.num_waiting, policy.inner.inner.small, policy.queue_depth) == (3, 0.3, 3)
    assert type(build(to_plain(compose("eviction=queue_informed"))["eviction"]).inner) is Lru
