"""Eviction: traces worked out by hand that tell the policies apart, each driven through the real block pool as well."""

from __future__ import annotations

from collections import Counter

import pytest

import kvlab
from kvlab.cache.pool import BlockPool
from kvlab.policies.base import EvictionPolicy, KeyEviction
from kvlab.policies.eviction import Fifo, Lfu, Lru, Random
from kvlab.policies.layout import Paged
from kvlab.replay import replay
from kvlab.testing import check_policy
from kvlab.types import IllegalDecision


def evicted(policy: EvictionPolicy | type[EvictionPolicy], accesses: str, capacity: int = 3) -> str:
    """Ids evicted, in order, when each letter is accessed as a request of its own."""
    result = replay([[letter] for letter in accesses], policy, capacity)
    return b"".join(result.evicted).decode()


@pytest.mark.parametrize(
    ("policy", "accesses", "expected"),
    [
        # Capacity 3. A is hit twice, then B and C come in, then D.
        (Lru, "AAABCD", "A"), (Fifo, "AAABCD", "A"), (Lfu, "AAABCD", "B"),
        # One more access of A before D: A is the latest used, and still the oldest.
        (Lru, "AAABCAD", "B"), (Fifo, "AAABCAD", "A"), (Lfu, "AAABCAD", "B"),
        # B gets a hit, C none: LFU takes the one with fewest hits wherever it stands.
        (Lru, "ABCBAD", "C"), (Fifo, "ABCBAD", "A"), (Lfu, "ABCBAD", "C"),
        # All have one hit; C reached its count first, then A, then B.
        (Lru, "ABCCABD", "C"), (Fifo, "ABCCABD", "A"), (Lfu, "ABCCABD", "C"),
        # A has two hits and outlives a loop of newcomers that have none.
        (Lfu, "AAABCDEBCDE", "BCDEBC"),
        # A count is forgotten at eviction: A goes with one hit, comes back with none (for D), and goes again before B and C.
        (Lfu, "AABBCCDAE", "ADA"),
        # FIFO again and again: the order of insertion, whatever is hit.
        (Fifo, "ABCABCADBE", "AB"),
    ],
)  # fmt: skip
def test_traces_that_tell_policies_apart(policy: type[EvictionPolicy], accesses: str, expected: str) -> None:
    assert evicted(policy, accesses) == expected


def make_pool(policy: EvictionPolicy, num_blocks: int) -> BlockPool:
    return BlockPool("gpu", num_blocks, 4, policy, Paged())


def run_prompt(pool: BlockPool, names: str) -> list[int]:
    """A request whose blocks are `names`: take, publish head to tail, let go tail first. Returns its block ids."""
    hits = []
    for name in names:
        block_id = pool.find(name.encode())
        if block_id is None:
            break
        hits.append(block_id)
    pool.hit(hits)
    fresh = pool.allocate(len(names) - len(hits))
    assert fresh is not None
    for depth in range(len(hits), len(names)):
        pool.publish(fresh[depth - len(hits)], names[depth].encode(), names[depth - 1].encode() if depth else None, depth)
    blocks = hits + fresh
    pool.release(reversed(blocks))
    return blocks


def cached(pool: BlockPool) -> str:
    return "".join(sorted(content.decode() for content in pool.by_content))


def test_lru_takes_the_tail_of_a_finished_prompt_first() -> None:
    """Public case 6: N=3, one finished prompt of three blocks, a new prompt needs one: the tail goes."""
    pool = make_pool(Lru(), 3)
    assert run_prompt(pool, "abc") == [0, 1, 2]
    assert run_prompt(pool, "x") == [2]
    assert cached(pool) == "abx"


def test_fifo_takes_the_head_of_a_finished_prompt_first() -> None:
    pool = make_pool(Fifo(), 3)
    run_prompt(pool, "abc")
    assert run_prompt(pool, "x") == [0]
    assert cached(pool) == "bcx"


def test_lfu_keeps_the_shared_prefix() -> None:
    """ab is shared by three prompts (2 hits each), the tails c, d have none: they go, the older first."""
    pool = make_pool(Lfu(), 5)
    for prompt in ("abc", "abd", "abe"):
        run_prompt(pool, prompt)
    run_prompt(pool, "x")
    assert cached(pool) == "abdex"
    run_prompt(pool, "y")
    assert cached(pool) == "abexy"


def test_a_held_block_is_passed_over_and_keeps_its_place() -> None:
    """FIFO, capacity 3: a is the oldest but held while x comes in, so b goes; let go again, a is the next."""
    pool = make_pool(Fifo(), 3)
    for name in "abc":
        run_prompt(pool, name)
    first = pool.find(b"a")
    assert first == 0
    pool.hit([0])
    run_prompt(pool, "x")
    assert cached(pool) == "acx"
    pool.release([0])
    run_prompt(pool, "y")
    assert cached(pool) == "cxy"


def test_random_gives_every_candidate_the_same_chance_and_repeats_with_its_seed() -> None:
    """4,000 evictions among 4 candidates: each is expected 1,000 times, give or take 4.5 standard deviations (27.4)."""
    accesses = [[number] for number in range(4004)]
    age: Counter[int] = Counter()  # how many younger blocks were in the cache when one went
    result = replay(accesses, Random(seed=3), capacity=4)
    held = [0, 1, 2, 3]
    for number, content in enumerate(result.evicted):
        age[held.index(int(content))] += 1
        held.remove(int(content))
        held.append(4 + number)
    assert sum(age.values()) == 4000
    assert all(abs(count - 1000) < 124 for count in age.values()), age
    assert replay(accesses, Random(seed=3), capacity=4).evicted == result.evicted
    assert replay(accesses, Random(seed=4), capacity=4).evicted != result.evicted


def test_random_draws_are_a_function_of_seed_and_number() -> None:
    """blake2b of "0/0" ... "0/6" (from b2sum, 8 bytes, little-endian) mod 3 is 0 1 2 0 0 2 2.

    The candidates are a list: the last one takes the place of the one that goes, the newcomer is put at the end. So
    ABC -> CBD -> CDE -> CDF -> FDG -> GDH -> GDI -> GDJ.
    """
    assert evicted(Random(seed=0), "ABCDEFGHIJ") == "ABECFHI"


def test_key_eviction_drops_stale_entries() -> None:
    """10,000 hits on two cached blocks leave a heap of no more than 2 * 2 + 32 entries, and the right victim."""
    policy = Fifo()
    pool = make_pool(policy, 3)
    for _ in range(5000):
        run_prompt(pool, "a")
        run_prompt(pool, "b")
    assert len(policy._heap) <= 36
    run_prompt(pool, "c")
    run_prompt(pool, "d")
    assert cached(pool) == "bcd"


class KeyIsNumber(KeyEviction):
    def key(self, block):
        return block.used_tick


class KeysAreMixed(KeyEviction):
    def key(self, block):
        return (1,) if block.depth % 2 else ("a",)


class KeysMeetLate(KeyEviction):
    """Siblings in the heap: nobody compares them before their parent goes."""

    def key(self, block):
        return ((0, 0), (1, 1), (1, "a"))[block.depth % 3]


ALLOWED = r"Allowed: a tuple of numbers; for a single one write \(block\.used_tick,\)\."
BAD_KEYS = [(KeyIsNumber, r"the key of block \d+ is \d+ "), (KeysAreMixed, r"the key of block \d+ is \((1|'a'),\) "),
            (KeysMeetLate, "keys can't be compared")]  # fmt: skip


@pytest.mark.parametrize(("policy", "words"), BAD_KEYS)
def test_keys_that_sort_nothing_are_said_in_words_in_a_replay(policy, words):
    with pytest.raises(IllegalDecision, match=f"eviction policy {policy.__name__} .*{words}.*{ALLOWED}"):
        replay([["A", "B", "C", "D", "E", "F"]], policy, 3)


@pytest.mark.parametrize(("policy", "words"), BAD_KEYS[:2])
def test_keys_that_sort_nothing_are_said_in_words_in_a_run(policy, words, tmp_path):
    overrides = ("model=dummy_llama3_8b", "workload=shared_prefix", "workload.num_requests=8", "num_blocks=80")
    config = kvlab.compose("runner=simulated", *overrides)
    with pytest.raises(IllegalDecision, match=f"eviction policy {policy.__name__} .*{words}.*{ALLOWED}"):
        kvlab.run(config, eviction=policy(), folder=tmp_path / "run", progress=False)


@pytest.mark.parametrize("policy", [policy for policy, _ in BAD_KEYS])
def test_keys_that_sort_nothing_break_a_rule_of_the_contract(policy):
    with pytest.raises(AssertionError, match=f"eviction policy {policy.__name__} breaks the rule 'total order'"):
        check_policy(policy)
