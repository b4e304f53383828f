"""Depth-first through the tree of cached prefixes, the heaviest branch first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress
from operator import attrgetter

from kvlab.policies.base import PrefixesView, SchedulingPolicy, is_whole, require
from kvlab.policies.scheduling._in_batch import deferred
from kvlab.types import GroupView, Now


class _Node:
    """A cached prefix: the groups that match it and no more, and how many match it or more."""

    __slots__ = ("children", "groups", "weight")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node] = {}
        self.groups: list[GroupView] = []
        self.weight = 0


class DfsWeight(SchedulingPolicy):
    """Requests are served branch by branch of the tree of cached prefixes, the branch that most requests wait for first.

    Source: SGLang (Zheng et al., NeurIPS 2024), https://arxiv.org/abs/2312.07104; `dfs-weight` of its
        https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/managers/schedule_policy.py
    Parameters: check_tokens: only a request with at most so many cached tokens may be put off to the end of the queue (-1: none is, as
        in SGLang); defer_tokens: it is, when it shares that many with one ahead, as in lpm.
    Deviations: SGLang finds out who should be put off, but does it in lpm only. Prefixes are compared in whole blocks. Branches of equal
        weight go in the order of their first request (there in the order in which they were cached), preempted requests before all
        others. Without a prefix cache there is one branch, in order of arrival, as there.
    """

    is_static = False

    def __init__(self, check_tokens: int = 32, defer_tokens: int = 32) -> None:
        for name, value, least in (("check_tokens", check_tokens, -1), ("defer_tokens", defer_tokens, 1)):
            whole = is_whole(value)
            require(whole and value >= least, self, name, value, f"a whole number, at least {least}")
        self.check_tokens = check_tokens
        self.defer_tokens = defer_tokens

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """Arrival (s): what decides where prefixes don't (see `order`)."""
        return (group.arrival_s,)

    def order(self, waiting: Sequence[GroupView], prefixes: PrefixesView, now: Now) -> Iterable[GroupView]:
        """Depth first, heaviest child first, a node's own requests after those of its children; those put off come last."""
        waiting = sorted(waiting, key=attrgetter("arrival_s"))  # equals stay in order of submission
        num_cached = list(map(prefixes.num_cached_tokens, waiting))
        puts_off = deferred(waiting, num_cached, prefixes, self.check_tokens, self.defer_tokens)
        size, matches = prefixes.block_size, defaultdict[bytes, list[GroupView]](list)  # by the last cached key
        num_blocks: dict[bytes, int] = {}
        for group, cached, later in zip(waiting, num_cached, puts_off, strict=True):
            if not later:
                keys = prefixes.keys(group) if cached >= size else ()
                num = min(cached // size, len(keys))  # what slots of a ring keep is found without keys
                last = keys[num - 1] if num else b""
                matches[last].append(group)
                num_blocks[last] = num
        root = _Node()
        for last, groups in matches.items():
            _insert(root, prefixes.keys(groups[0])[: num_blocks[last]], groups)
        return chain(_depth_first(root), compress(waiting, puts_off))


def _insert(root: _Node, path: Sequence[bytes], groups: list[GroupView]) -> None:
    node = root
    node.weight += len(groups)
    for key in path:
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = _Node()
        node = child
        node.weight += len(groups)
    node.groups = groups


def _depth_first(root: _Node) -> Iterator[GroupView]:
    """Paths may be thousands of blocks long: a stack of our own."""
    stack: list[tuple[_Node, bool]] = [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield from node.groups
            continue
        stack.append((node, True))
        heaviest_first = sorted(node.children.values(), key=lambda child: -child.weight)
        stack += [(child, False) for child in reversed(heaviest_first)]
