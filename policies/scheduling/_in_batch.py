"""In-batch prefix sharing: a request that shares its beginning with one ahead of it is better served after it, from the cache."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import PrefixesView
from kvlab.types import GroupView


def deferred(waiting: Sequence[GroupView], num_cached: Sequence[int], prefixes: PrefixesView, check_tokens: int,
             defer_tokens: int) -> list[bool]:  # fmt: skip
    """For each waiting group: whether it is put off to the end of the queue.

    It is when at most `check_tokens` of it are cached (`num_cached`) and one before it in `waiting`, not put off itself and as little
    cached, begins with the same `defer_tokens` tokens (in whole blocks) and will publish them. A negative `check_tokens` puts nobody off.
    """
    last = max(1, -(-defer_tokens // prefixes.block_size)) - 1
    num_tokens = (last + 1) * prefixes.block_size
    keys_of = prefixes.keys
    seen: set[bytes] = set()
    puts_off: list[bool] = []
    for group, cached in zip(waiting, num_cached, strict=True):
        if cached > check_tokens or len(keys := keys_of(group)) <= last:
            puts_off.append(False)
            continue
        beginning = keys[last]  # a key stands for all tokens up to its block's end
        puts_off.append(beginning in seen)
        if group.num_cacheable_tokens >= num_tokens:
            seen.add(beginning)
    return puts_off
