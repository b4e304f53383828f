"""Depth-first through the tree of cached prefixes, the heaviest branch first."""

from __future__ import annotations

from collections.abc import Sequence

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

    def order(self, waiting: Sequence[GroupView], prefixes: PrefixesView, now: Now) -> Sequence[GroupView]:
        """Depth first, heaviest child first, a node's own requests after those of its children; those put off come last."""
        waiting = sorted(waiting, key=lambda group: (group.arrival_s, group.group_id))
        num_cached = [prefixes.num_cached_tokens(group) for group in waiting]
        puts_off = deferred(waiting, num_cached, prefixes, self.check_tokens, self.defer_tokens)
        root = _Node()
        for group, cached, later in zip(waiting, num_cached, puts_off, strict=True):
            if not later:
                _insert(root, prefixes.keys(group)[: cached // prefixes.block_size], group)
        return [*_depth_first(root), *(group for group, later in zip(waiting, puts_off, strict=True) if later)]


def _insert(root: _Node, path: Sequence[bytes], group: GroupView) -> None:
    node = root
    node.weight += 1
    for key in path:
        node = node.children.setdefault(key, _Node())
        node.weight += 1
    node.groups.append(group)


def _depth_first(root: _Node) -> list[GroupView]:
    """Paths may be thousands of blocks long: a stack of our own."""
    ordered: list[GroupView] = []
    stack: list[tuple[_Node, bool]] = [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            ordered += node.groups
            continue
        stack.append((node, True))
        heaviest_first = sorted(node.children.values(), key=lambda child: -child.weight)
        stack += [(child, False) for child in reversed(heaviest_first)]
    return ordered
