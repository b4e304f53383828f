"""Looking up and publishing prefixes: the radix tree beside the hash chain, by block size. Microseconds a prompt, and their ratio.

    python experiments/bench/bench_prefix_index.py

400 prompts of 2,048 tokens are cached: 20 documents of 1,024 tokens, 20 questions of 1,024 tokens about each. Asked are 200 others about
the same documents (hits of 1,024 tokens) and 200 that share nothing. "first": a prompt that was never looked up (it is hashed, or packed,
on the way); "again": one that waits and is looked up in every step. "publish": all blocks of a prompt, their keys and the eviction of as
many others included. Processor time of the thread.
"""

from __future__ import annotations

import time
from random import Random
from statistics import median

from kvlab.cache.manager import KVCacheManager
from kvlab.engine.sequence import Sequence, SequenceGroup
from kvlab.policies.base import PrefixCachePolicy
from kvlab.policies.compression import Full
from kvlab.policies.eviction import Lru
from kvlab.policies.layout import Paged
from kvlab.policies.prefix_cache import Hash, Radix
from kvlab.types import Request, SamplingParams

LENGTH, HALF, VOCAB = 2048, 1024, 50_000
ROUNDS = 5


def tokens(seed: str, num: int) -> list[int]:
    """Ids that depend on the seed alone; equal ids are objects of their own, as those of different requests are."""
    draw = Random(seed)
    return [int(str(draw.randrange(VOCAB))) for _ in range(num)]


def sequence(prompt: list[int]) -> Sequence:
    """The only one of its group."""
    group = SequenceGroup(0, Request("", prompt, SamplingParams(max_tokens=1)), 0, (), 1)
    group.seqs.append(Sequence(0, group, 0, prompt))
    return group.seqs[0]


def serve(kv: KVCacheManager, prompt: list[int]) -> float:
    """Enter, compute, publish, end; returns the seconds of publication and of what room it took."""
    seq = sequence(prompt)
    start = time.thread_time()
    assert kv.enter(seq.group, kv.find_prefix(seq, LENGTH - 1), LENGTH)
    seq.num_computed = LENGTH
    kv.publish(seq)
    kv.release(seq)
    return time.thread_time() - start


def look_up(kv: KVCacheManager, prompts: list[list[int]]) -> tuple[float, float]:
    """Median seconds of a prompt's first look-up, and of its third."""
    first, second, again = list[float](), list[float](), list[float]()
    for prompt in prompts:
        seq = sequence(list(prompt))
        for times in (first, second, again):
            start = time.thread_time()
            kv.match_prefix(seq, LENGTH - 1)
            times.append(time.thread_time() - start)
    return median(first), median(again)


def measure(policy: PrefixCachePolicy, block_size: int) -> dict[str, float]:
    """Microseconds of each operation."""
    num_blocks = (20 * HALF + 440 * HALF) // block_size
    kv = KVCacheManager(num_blocks, 0, block_size, Lru(), policy, Paged(), Full(), 1 << 20, track_shareable=False)
    documents = [tokens(f"document {d}", HALF) for d in range(20)]
    for q in range(400):
        serve(kv, documents[q % 20] + tokens(f"question {q}", HALF))
    found: dict[str, float] = {}
    found["first, hit"], found["again, hit"] = look_up(kv, [documents[q % 20] + tokens(f"other {q}", HALF) for q in range(200)])
    found["first, miss"], found["again, miss"] = look_up(kv, [tokens(f"stranger {q}", LENGTH) for q in range(200)])
    fresh = [tokens(f"fresh {q}", LENGTH) for q in range(120)]
    found["publish"] = median([serve(kv, prompt) for prompt in fresh][20:])
    assert kv.pool.num_evicted, "nothing was evicted"
    return {name: seconds * 1e6 for name, seconds in found.items()}


def main() -> None:
    print(f"{'block':>5} {'operation':<12} {'hash us':>9} {'radix us':>9} {'radix / hash':>12}")
    for block_size in (1, 16, 32, 256):
        rounds = [(measure(Hash(), block_size), measure(Radix(), block_size)) for _ in range(ROUNDS if block_size > 1 else 1)]
        for name in rounds[0][0]:
            chain, tree = (min(pair[i][name] for pair in rounds) for i in (0, 1))
            print(f"{block_size:>5} {name:<12} {chain:>9.1f} {tree:>9.1f} {tree / chain:>12.2f}")


if __name__ == "__main__":
    main()
