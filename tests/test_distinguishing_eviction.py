"""Each eviction policy has a trace, worked out by hand, on which it alone evicts what it should: no policy silently acts as another."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest

from kvlab.cache.pool import BlockPool, CachedBlock
from kvlab.policies.base import EvictionPolicy
from kvlab.policies.eviction import Fifo
from kvlab.policies.layout import Paged
from kvlab.policies.registry import by_name, list_policies
from kvlab.types import Now


class Trace(NamedTuple):
    """`requests`: prompts one after the other, each letter a full block (a letter always has the same blocks before it).
    `evicted`: what goes, in order. `num_waiting`: how many requests, the one about to be served included, the policy is told to be waiting.
    `seconds`: arrival of each request (default: 0, 1, 2 ...)."""

    capacity: int
    requests: str
    evicted: str
    num_waiting: int = 0
    seconds: tuple[float, ...] = ()
    block_size: int = 16


SETTINGS: dict[str, dict[str, Any]] = {
    "leaf_first": {"inner": Fifo()},  # with lru inside it is lru wherever prompts are let go tail first
    "tlru": {"threshold_tokens": 32, "next_prompt_tokens": 16},
}
"""Parameters other than the defaults, by policy."""


def make(name: str) -> EvictionPolicy:
    policy: EvictionPolicy = by_name("eviction", name, **copy.deepcopy(SETTINGS.get(name, {})))
    return policy


def serve(policy: EvictionPolicy, trace: Trace) -> str:
    """Serve the requests as the engine does: hits are held, then missing blocks taken and published, at last all let go, tail first."""
    prompts = trace.requests.split()
    evicted: list[str] = []

    def note(kind: str, tier: str, block: CachedBlock) -> None:
        if kind == "evict":
            evicted.append(block.content.decode())

    contents = [[letter.encode() for letter in prompt] for prompt in prompts]
    if policy.sees_future:
        policy.foresee(contents)
    pool = BlockPool("gpu", trace.capacity, trace.block_size, policy, Paged(), note)
    for number, prompt in enumerate(contents):
        pool.now = Now(number, trace.seconds[number] if trace.seconds else float(number))
        if policy.queue_depth:
            policy.waiting(contents[number : number + min(trace.num_waiting, policy.queue_depth)], pool.now)
        hits: list[int] = []
        for content in prompt:
            block_id = pool.find(content)
            if block_id is None:
                break
            hits.append(block_id)
        pool.hit(hits)
        fresh = pool.allocate(len(prompt) - len(hits))
        assert fresh is not None
        for depth, block_id in enumerate(fresh, len(hits)):
            pool.publish(block_id, prompt[depth], prompt[depth - 1] if depth else None, depth)
        pool.release(reversed(hits + fresh))
    return "".join(evicted)


TRACES: dict[str, Trace] = {
    # A and B fill T1, the hit moves A to T2. C: T1 (B alone) is larger than p = 0, B goes. B: C goes from T1; then B1 remembers B, p
    # becomes 1, B enters T2. D: T1 is empty, so the least recently used of T2 goes, A.
    "arc": Trace(2, "A B A C B D", "BCA"),
    # D: the next uses are A at 4, C at 5, B at 6: B goes. B: nobody is used again, D has been unused longest.
    "belady": Trace(3, "A B C D A C B", "BD"),
    # The ring is A B C, C and A have bits. D: the hand takes A's bit, B goes, D is put there. E: it takes C's bit, comes to A, A goes.
    "clock": Trace(3, "A B C C A D E", "BA"),
    # F G A, F is hit, B fills the pool. C takes the oldest, F, though it was hit. FG: F is gone, so both are missing: G goes, then A.
    # ABC: A is gone, so all are missing: B, C, F go. D: G is the oldest.
    "fifo": Trace(4, "FG A F ABC FG ABC D", "FGABCFG"),
    # C came last, though B was used last.
    "filo": Trace(3, "A B C C B D", "C"),
    # Values 1, 2 (B has a hit), 1. D: A goes (as low as C, used earlier), the age is 1, so D is worth 2. E: C goes, E is worth 2. A: B, D
    # and E are worth 2, B was used longest ago.
    "gdsf": Trace(3, "A B B C D E A", "ACB"),
    # Hits: A 1, B 1, C 0. FG: C goes, then A, which had its hit before B. Again: F 1, G 1. AB: A is gone, so both are missing: of B, F, G
    # with a hit each B had it first, then F. FG: F is gone, so both are missing: A and B have no hits, A came first.
    "lfu": Trace(3, "AB ABC FG FG AB FG", "CABFAB"),
    # One LIR block, one HIR. A is LIR, B HIR; A's hit puts it above B, which falls out of the stack. C: B goes, unremembered. B: C goes,
    # remembered. C: B goes; C is remembered: LIR, so A becomes HIR. D: A goes.
    "lirs": Trace(2, "A B A C B C D", "BCBA"),
    # Let go tail first: E, D, then A; D is used again, F comes in: E A D F. I takes E; H takes A, although A waits; A takes D.
    "lru": Trace(4, "DE A D F I H A F", "EAD", num_waiting=2),
    # B was used last, though C came last.
    "mru": Trace(3, "A B C B D", "B"),
    # Draws mod 3 are 0, 1 (see test_policies_eviction). A's hit moves C into its place and A to the end: C B A. D: C goes, A takes its
    # place, D comes to the end: A B D. C: B goes.
    "random": Trace(3, "A B C A D C", "CB"),
    # One place in the small queue. A enters it; B the main queue, as nothing was evicted yet. C: A goes. D: C goes, the one ghost is C now.
    # A: D goes, and A, forgotten, enters the small queue.
    "s3fifo": Trace(2, "A B C D A", "ACD"),
    # C and A are visited. D: the hand spares A, B goes. E: it spares C and comes to D, the newest: D goes, the hand starts again. D: A
    # goes, whose bit was taken.
    "sieve": Trace(3, "A B C C A D E D", "BDA"),
    # Four are protected. ABC, then FG are hit: the fifth, when G is let go, pushes out C, the one let go first: on probation are D, C. J: D
    # goes. DE: C goes, then J, which was never hit, though B was used earlier.
    "slru": Trace(6, "ABC FG D ABC FG J DE", "DCJ"),
    # One block in A1in, two remembered. E: A goes. A: B goes, A is remembered: Am. A again. B: C goes, B to Am. C: D goes, C to Am. F: A1in
    # is E alone, not too long: the least recently used of Am goes, A.
    "two_q": Trace(4, "A B C D E A A B C F", "ABCDA"),
    # One block in the window. A and B fall through it to the main part, C is in it. D: C has one use, as A: the newcomer loses. C: D loses
    # to A likewise. A is hit. D: C has two uses by now, B one: B goes.
    "w_tinylfu": Trace(3, "A B C D C A D", "CDB"),
    # -- made for LLM serving
    # Blocks of 16,384 tokens of Llama 3 8B: at depths 0 to 3 they cost 1.27, 1.80, 2.34, 2.87 times their matrices. a and x (depth 0, one
    # hit) are worth 2.54 each, a is older; d (no hit) 2.87. Then y, hit once, is newer than x, which goes; then z and w, 1.27.
    "cost_aware": Trace(5, "abcd abc x x y y z w v", "axzw", block_size=16384),
    # inner: fifo. The head a came first, but among the leaves c did, then b, then a; x is younger, though never hit.
    "leaf_first": Trace(4, "abc x abc y z w", "cba"),
    # Nobody has a hit, c stands latest; then b; then x has one, and of a, y, z the oldest goes; then y, z and w make room for abc.
    "length_aware": Trace(4, "x abc y z x w abc", "cbayzw"),
    # The same blocks. Recency and FLOPs from 0 to 1: x 0 + 0; then a 0.6 + 0, b .4 + .33, c .2 + .67, d 0 + 1, y 1 + 0: the head a; then b
    # .29 + .33 (y .71, c .14 + .67, d 1, z 1); then y .56 (c .11 + .67, d 1, z .78, w 1).
    "marconi": Trace(5, "x abcd y z w v", "xaby", block_size=16384),
    # e is the only one without a hit; then all have one, and the oldest goes, however many it has; then newcomers, one after the other,
    # though e comes back.
    "never_hit_first": Trace(6, "a a a b b c c d d e f f g g h i j e k", "eahije", seconds=(0,) * 15 + (100,) * 4),
    # A quarter of 8 blocks of 256 tokens: a and b are hit and begin below 512. c does not, d and e are the next.
    "pinned": Trace(8, "abc abc d e f g h i j k", "cde", block_size=256),
    # d comes, d and a wait: b goes for it. e and b wait, b is gone: c. b waits: d, though a, spared before, was used no later than e.
    "queue_informed": Trace(3, "a b c d a e b", "bcd", num_waiting=2),
    # One block of 16 and 16 new tokens are 32, two are more: f and y may go; then, as none else may, e, d, c, the oldest; then o may.
    "tlru": Trace(8, "abcdef xy klmno q", "fyedco"),
    # ab comes back as abc at 10 s and lives to 70 s; x, y, z expire at 30, 31, 80 s when they are let go. At 80 s z, then c.
    "ttl": Trace(4, "ab abc x y z w v", "xyzc", seconds=(0, 10, 20, 30, 31, 80, 80)),
}


@pytest.mark.parametrize("owner", TRACES)
def test_only_the_owner_passes_its_trace(owner: str) -> None:
    trace = TRACES[owner]
    evicted = {row.name: serve(make(row.name), trace) for row in list_policies("eviction")}
    assert evicted.pop(owner) == trace.evicted
    assert [name for name, others in evicted.items() if others == trace.evicted] == []


def test_every_policy_has_a_trace() -> None:
    assert sorted(TRACES) == [row.name for row in list_policies("eviction")]
