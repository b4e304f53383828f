"""How many tokens a prompt shares with cached content beyond its block hits: what block granularity loses.

Children of a cached prefix are kept as a sorted list of token tuples; of a sorted list, the neighbours of a query share the most with it,
so a look-up is one bisection however many children there are.
"""

from __future__ import annotations

from bisect import bisect_left, insort

Tokens = tuple[int, ...]


def common_prefix_len(a: Tokens | list[int], b: Tokens | list[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    for i in range(n):
        if a[i] != b[i]:
            return i
    return n


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
