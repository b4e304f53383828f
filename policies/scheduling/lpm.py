"""Longest prefix match."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from kvlab.policies.base import PrefixesView, SchedulingPolicy, is_whole, require
from kvlab.policies.scheduling._in_batch import deferred
from kvlab.types import GroupView, Now


class Lpm(SchedulingPolicy):
    """The request with the longest cached prefix goes first; one that shares an uncached beginning with another waits for it.

    Source: SGLang (Zheng et al., NeurIPS 2024), https://arxiv.org/abs/2312.07104; `lpm` of its
        https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/managers/schedule_policy.py
    Parameters: max_waiting: with more waiting it is first come, first served. check_tokens: only a request with at most so many cached
        tokens may be put off to the end of the queue (-1: none is); defer_tokens: it is, when it shares that many with one ahead.
    Deviations: prefixes are compared in whole blocks, so `defer_tokens` is rounded up to one. Equals go in order of arrival (there in
        the order of the last sort), and preempted requests before all others. Without a prefix cache nothing is shared and all are
        equal, as there.
    """

    is_static = False

    def __init__(self, max_waiting: int = 128, check_tokens: int = 32, defer_tokens: int = 32) -> None:
        for name, value, least in (("max_waiting", max_waiting, 0), ("check_tokens", check_tokens, -1), ("defer_tokens", defer_tokens, 1)):
            whole = is_whole(value)
            require(whole and value >= least, self, name, value, f"a whole number, at least {least}")
        self.max_waiting = max_waiting
        self.check_tokens = check_tokens
        self.defer_tokens = defer_tokens

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """Arrival (s): what decides where prefixes don't (see `order`)."""
        return (group.arrival_s,)

    def order(self, waiting: Sequence[GroupView], prefixes: PrefixesView, now: Now) -> Sequence[GroupView]:
        """By cached tokens, most first; those put off come last."""
        waiting = sorted(waiting, key=attrgetter("arrival_s"))  # equals stay in order of submission
        if len(waiting) > self.max_waiting:
            return waiting
        num_cached = [prefixes.num_cached_tokens(group) for group in waiting]
        puts_off = deferred(waiting, num_cached, prefixes, self.check_tokens, self.defer_tokens)
        places = sorted(range(len(waiting)), key=lambda i: (puts_off[i], 0 if puts_off[i] else -num_cached[i]))
        return [waiting[i] for i in places]
