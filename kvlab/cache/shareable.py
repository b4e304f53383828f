"""How many tokens a prompt shares with cached content beyond its block hits: what block granularity loses.

Children of a cached prefix are kept as a sorted list of token tuples; of a sorted list, the neighbours of a query share the most with it,
so a look-up is one bisection however many children there are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from typing import TypeVar

Tokens = tuple[int, ...]
Run = TypeVar("Run", list[int], Tokens, bytes, "array[int]")


def common_prefix_len(a: Run, b: Run) -> int:
    """Length of the longest common prefix of two sequences of one type. Halves are compared at C speed: O(n), however they end."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # equal up to low, different before high
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class ShareableIndex:
    """Token contents of cached blocks by parent."""

    def __init__(self) -> None:
        self._children: dict[bytes, list[Tokens]] = {}
        self._of: dict[bytes, tuple[bytes, Tokens]] = {}

    def add(self, content: bytes, parent: bytes, tokens: Tokens) -> None:
        """A block with `tokens` after `parent` was published as `content`."""
        self._of[content] = (parent, tokens)
        insort(self._children.setdefault(parent, []), tokens)

    def discard(self, content: bytes) -> None:
        """The block is gone."""
        parent, tokens = self._of.pop(content)
        children = self._children[parent]
        del children[bisect_left(children, tokens)]
        if not children:
            del self._children[parent]

    def num_shared(self, parent: bytes, tokens: Tokens) -> int:
        """Longest common prefix of `tokens` with any cached child of `parent`, in tokens."""
        children = self._children.get(parent)
        if not children:
            return 0
        at = bisect_left(children, tokens)
        return max(common_prefix_len(tokens, children[i]) for i in (at - 1, at) if 0 <= i < len(children))
