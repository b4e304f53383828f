"""Published eviction policies in their corners: ghosts that are trimmed, counts that are reset, ties; worked out by hand, or by a
textbook version of the whole policy over plain lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

import pytest
from eviction_stage import Stage

from kvlab.policies.base import EvictionPolicy
from kvlab.policies.eviction import Arc, Gdsf, Lirs, Lru, S3Fifo, Sieve, Slru, Ttl, TwoQ, WTinyLfu
from kvlab.policies.eviction._queues import Ghosts
from kvlab.policies.eviction._sketch import FrequencySketch
from kvlab.replay import replay


def evicted(policy: EvictionPolicy | type[EvictionPolicy], accesses: str, capacity: int) -> str:
    """Ids evicted, in order, when each letter is accessed as a request of its own."""
    return b"".join(replay([[letter] for letter in accesses], policy, capacity).evicted).decode()


# ----------------------------------------------------------------------------------------------------------------- arc


def test_arc_p_grows_by_the_ratio_of_the_ghost_lists_and_is_never_negative() -> None:
    """c = 4, A..D hit: all in T2. E: A to B2. F: E to B1; F hit: T2. G: B to B2. E: in B1, p = max(1, 2 / 1) = 2; C to B2. H: T1 = G is
    not above 2: D. I: T1 = G H is not above 2: F (with p = 1 it would be G).
    Second: E: A to B2. A: in B2, p = max(0 - 1, 0) = 0; T1 gives E, to B1. E: p = 1; B to B2. F: C. G: T1 = F is not above 1: D (with p
    from -1 to 0 it would be F)."""
    assert evicted(Arc, "ABCDABCD" + "EFFGEHI", 4) == "AEBCDF"
    assert evicted(Arc, "ABCDABCD" + "EAEFG", 4) == "AEBCD"


def test_arc_forgets_what_is_too_long_ago() -> None:
    """c = 2. C: A goes, but |T1| + |B1| = 2 + 1: A is forgotten. A: B goes, A is new, in T1; D: T1 gives C.
    Second: T2 = A B. C (hit): A to B2. D (hit): B to B2. E: C to B2; 2 + 3 are more than 4: A is forgotten. A: T1 gives E, A is new, in T1.
    F: T1 gives A."""
    assert evicted(Arc, "ABCAD", 2) == "ABC"
    assert evicted(Arc, "ABABCCDDEAF", 2) == "ABCEA"


# ---------------------------------------------------------------------------------------------------- s3fifo and sieve


def test_s3fifo_a_promoted_block_begins_without_hits() -> None:
    """Capacity 3, one in the small queue. A enters it, B and C the main one; A is hit twice. D: A is promoted, B goes. E: D goes. D: E
    goes, D is remembered: main is C A D. F: C goes. G: F goes. F: G goes, F to main. H: A goes: its hits were spent on the promotion."""
    assert evicted(S3Fifo, "ABCAADEDFGFH", 3) == "BDECFGA"


def test_s3fifo_remembers_what_left_the_small_queue_only() -> None:
    """As above until D: A is promoted, B goes from main. B: it is new, D goes from the small queue. E: B goes."""
    assert evicted(S3Fifo, "ABCAADBE", 3) == "BDB"


def test_s3fifo_each_hit_buys_a_round() -> None:
    """Main is B C, B has two hits. D: A goes. A: D goes, A to main. E: B spends a hit, C goes. F: E. E: F goes, E to main: A B E. G: A
    goes. H: G. G: H goes, G to main: B E G. I: B spends its second hit, E goes."""
    assert evicted(S3Fifo, "ABCBBDAEFEGHGI", 3) == "ADCEFAGHE"


@pytest.mark.parametrize("policy", [S3Fifo, Lru])
def test_a_choice_that_is_hit_is_no_candidate_any_more(policy: Callable[[], EvictionPolicy]) -> None:
    stage = Stage(policy(), 3)
    stage.serve("a", "b", "c")
    chooses, pool = stage.pool.eviction, stage.pool
    assert chooses is not None
    first = chooses.victim(pool.now)
    pool.hit([first])
    assert chooses.victim(pool.now) != first


def textbook_s3fifo(accesses: list[int], capacity: int) -> list[int]:
    """Yang et al., algorithm 1, over plain deques: what goes, in order. (Until something went, a full small queue passes newcomers on.)"""
    small, main, ghosts = deque[int](), deque[int](), deque[int]()
    count: dict[int, int] = {}
    gone: list[int] = []
    size = max(1, int(0.1 * capacity))
    for block in accesses:
        if block in count:
            count[block] = min(count[block] + 1, 3)
            continue
        remembered = block in ghosts
        if remembered:
            ghosts.remove(block)
        while len(small) + len(main) >= capacity:
            takes_small = len(small) >= size
            while takes_small and small:
                oldest = small.popleft()
                if count[oldest] < 2:
                    ghosts.append(oldest)
                    gone.append(oldest)
                    del count[oldest]
                    if len(ghosts) > int(0.9 * capacity):
                        ghosts.popleft()
                    break
                main.append(oldest)
                count[oldest] = 0
            else:
                while count[main[0]]:
                    count[main[0]] -= 1
                    main.rotate(-1)
                gone.append(main[0])
                del count[main.popleft()]
        (main if remembered or (not gone and len(small) >= size) else small).append(block)
        count[block] = 0
    return gone


def textbook_sieve(accesses: list[int], capacity: int) -> list[int]:
    """Zhang et al., figure 2: a list, oldest first, a bit a block, and a hand."""
    blocks: list[int] = []
    visited: set[int] = set()
    hand = 0
    gone: list[int] = []
    for block in accesses:
        if block in blocks:
            visited.add(block)
            continue
        if len(blocks) == capacity:
            while blocks[hand] in visited:
                visited.discard(blocks[hand])
                hand = (hand + 1) % capacity
            gone.append(blocks.pop(hand))
            if hand == len(blocks):
                hand = 0
        blocks.append(block)
    return gone


def textbook_two_q(accesses: list[int], capacity: int) -> list[int]:
    """Johnson and Shasha, the full version: A1in a quarter of the pool, A1out remembers half as many as the pool holds."""
    a1in, am, a1out = deque[int](), deque[int](), deque[int]()
    gone: list[int] = []
    for block in accesses:
        if block in am:
            am.remove(block)
            am.append(block)
            continue
        if block in a1in:
            continue
        remembered = block in a1out
        if remembered:
            a1out.remove(block)
        if len(a1in) + len(am) == capacity:
            if am and len(a1in) <= int(0.25 * capacity):
                gone.append(am.popleft())
            else:
                gone.append(a1in.popleft())
                a1out.append(gone[-1])
                if len(a1out) > int(0.5 * capacity):
                    a1out.popleft()
        (am if remembered else a1in).append(block)
    return gone


def textbook_lirs(accesses: list[int], capacity: int) -> list[int]:
    """Jiang and Zhang: a stack of what was used lately and a queue of resident HIR blocks; as many gone ones are remembered as it holds."""
    stack: list[int] = []  # the most recent last
    queue, forgotten_next = deque[int](), deque[int]()
    lir: set[int] = set()
    gone: list[int] = []
    num_lir = capacity - max(1, int(0.2 * capacity))

    def prune() -> None:
        while stack and stack[0] not in lir:
            lowest = stack.pop(0)
            if lowest in forgotten_next:
                forgotten_next.remove(lowest)

    def to_top(block: int) -> None:
        if block in stack:
            stack.remove(block)
        stack.append(block)

    for block in accesses:
        in_stack, was_gone = block in stack, block in forgotten_next
        if block in lir:
            to_top(block)
        elif block in queue:
            queue.remove(block)
            to_top(block)
            if in_stack:
                lir.add(block)
            else:
                queue.append(block)
        else:
            if len(lir) + len(queue) == capacity:
                gone.append(queue.popleft())
                if gone[-1] in stack:
                    forgotten_next.append(gone[-1])
            was_gone = block in forgotten_next
            if was_gone:
                forgotten_next.remove(block)
            to_top(block)
            if was_gone or len(lir) < num_lir:
                lir.add(block)
            else:
                queue.append(block)
            while len(forgotten_next) > capacity:
                stack.remove(forgotten_next.popleft())
        if len(lir) > num_lir:
            lowest = next(one for one in stack if one in lir)
            lir.remove(lowest)
            stack.remove(lowest)
            queue.append(lowest)
        prune()
    return gone


def lirs() -> Lirs:
    return Lirs(hir=0.2, ghosts=1.0)


@pytest.mark.parametrize(("policy", "textbook"), [(S3Fifo, textbook_s3fifo), (Sieve, textbook_sieve), (TwoQ, textbook_two_q),
                                                  (lirs, textbook_lirs)])  # fmt: skip
def test_a_textbook_decides_the_same(policy: Callable[[], EvictionPolicy], textbook: object) -> None:
    """2,000 accesses, some ids far more often than others, in pools of 2 to 30."""
    for capacity in (2, 3, 10, 30):
        rng = Random(capacity)
        accesses = [int(rng.paretovariate(0.7)) % (4 * capacity) for _ in range(2000)]
        gone = textbook(accesses, capacity)  # type: ignore[operator]
        assert len(gone) > 150
        assert list(replay([[block] for block in accesses], policy(), capacity).evicted) == [str(block).encode() for block in gone]


def test_w_tinylfu_hits_in_the_window_count() -> None:
    """The window holds one block. j leaves it for x and loses its tie with a, the oldest of the rest; x, used four times when it leaves for
    y, beats a; y loses its tie with b. With uncounted hits x would lose its tie with a."""
    assert evicted(WTinyLfu, "abcdefghijxxxxyz", 10) == "jay"
    assert evicted(WTinyLfu, "abcdefghijxyz", 10) == "jxy"


# ------------------------------------------------------------------------------------------ ghosts, segments, sketch


def test_ghosts_are_taken_once_and_the_oldest_is_forgotten() -> None:
    ghosts = Ghosts(2)
    for content in (b"a", b"b", b"c"):
        ghosts.add(content)
    assert [ghosts.take(content) for content in (b"a", b"b", b"b", b"c")] == [False, True, False, True]


def test_slru_what_falls_back_is_the_latest_on_probation() -> None:
    """c = 6, four protected: A B C D; E and F on probation. E is hit: the fifth, so A falls back, behind F. G: F goes, then A."""
    assert evicted(Slru, "ABCDEFABCDEGH", 6) == "FA"


def test_slru_a_protected_block_that_goes_makes_room() -> None:
    """c = 2, one protected. A is hit: protected; b is held. c: A goes. c is hit: the one protected, it stays so, and b goes for d."""
    stage = Stage(Slru(), 2)
    stage.serve("a", "a")
    b = stage.hold("b")
    assert stage.serve("c", "c") == "a"
    stage.let_go(b)
    assert stage.serve("d") == "ab"


def test_two_q_a_hit_changes_nothing_in_a1in() -> None:
    """c = 4, one in A1in is not too long. A is hit and still the first to go; the hit did not put it into Am."""
    assert evicted(TwoQ, "ABCDAEF", 4) == "AB"


def test_the_sketch_halves_its_own_count_of_uses() -> None:
    """10 uses halve all counts and leave 5: the next halving comes after 5 more."""
    sketch = FrequencySketch(capacity=64, sample=10)
    places = sketch.places(b"x")
    counts = []
    for _ in range(15):
        sketch.add(places)
        counts.append(sketch.count(places))
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5]


# ----------------------------------------------------------------------------------------------------------- gdsf, ttl


def test_gdsf_a_hit_is_worth_todays_age() -> None:
    """c = 2. C: A goes, the age is 1, C is worth 2; hit: 1 + 2 = 3. B is hit: 1 + 2 = 3 too (not the 1 + 1 of its own time). D: of equals
    C, used earlier."""
    assert evicted(Gdsf, "ABCCBD", 2) == "AC"


def test_gdsf_the_age_never_falls() -> None:
    """Three blocks; a, worth 1, is held while b and c, worth 1, and d, worth 2, go: the age is 2; e is worth 2, f 3. a goes, the age
    stays 2: g is worth 3. h takes e and is worth 3, i takes f, the oldest of three that are worth 3. (With an age of 1 after a, g would be
    worth 2, and go for i.)"""
    stage = Stage(Gdsf(), 3)
    a = stage.hold("a")
    assert stage.serve("b", "c", "d", "e", "f") == "bcd"
    stage.let_go(a)
    assert stage.serve("g") == "bcda"
    assert stage.serve("h") == "bcdae"
    assert stage.serve("i") == "bcdaef"
    policy = stage.pool.eviction
    assert isinstance(policy, Gdsf)
    assert policy._age == 3.0


def test_ttl_forgets_with_the_block_that_it_came_back() -> None:
    """c continues b, a conversation that came back; both go. b and c come in anew, in one request: nobody came back, and they expire at
    once, before x, which was hit."""
    stage = Stage(Ttl(ttl_s=60), 3)
    stage.serve("a", "abc")
    assert stage.at(100.0).serve("x", "y", "z") == "cba"
    stage.serve("x")
    stage.at(200.0).serve("abc")
    policy = stage.pool.eviction
    assert isinstance(policy, Ttl)
    assert policy._returned == set()
    assert policy._num_children == {b"a": 1, b"b": 1}
