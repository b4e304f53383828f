"""Cost of a block's content key (prefix_cache=hash): nanoseconds a block, by block size.

    python experiments/bench/bench_prefix_hash.py
"""

from __future__ import annotations

import timeit

from kvlab.policies.prefix_cache import Hash

NUM_CALLS = 20_000


def main() -> None:
    cache = Hash()
    root = cache.root("")
    for block_size in (1, 16, 32, 256):
        tokens = list(range(1000, 1000 + block_size))
        seconds = min(timeit.repeat(lambda tokens=tokens: cache.key(root, tokens), number=NUM_CALLS, repeat=5))
        nanoseconds = seconds / NUM_CALLS * 1e9
        print(f"block of {block_size:>3} tokens: {nanoseconds:6.0f} ns, {nanoseconds / block_size:5.0f} ns a token")


if __name__ == "__main__":
    main()
