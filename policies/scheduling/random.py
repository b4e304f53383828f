"""A random order."""

from __future__ import annotations

from hashlib import blake2b

from kvlab.policies.base import SchedulingPolicy, is_whole, require
from kvlab.types import GroupView, Now


class Random(SchedulingPolicy):
    """Each request draws its place once: the baseline that an order has to beat.

    Source: the classic; SGLang's `--schedule-policy random`,
        https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/managers/schedule_policy.py
    Parameters: seed: any integer; the same seed and the same request ids give the same order.
    Deviations: a request keeps its draw, blake2b(seed, request id), while it waits; SGLang shuffles the queue anew each time.
    """

    def __init__(self, seed: int = 0) -> None:
        require(is_whole(seed), self, "seed", seed, "an integer")
        self.seed = seed

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """A draw from [0, 2^64)."""
        digest = blake2b(f"{self.seed}/{group.request_id}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little"),)
