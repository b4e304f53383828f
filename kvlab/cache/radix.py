"""A radix tree over the tokens of cached blocks: which blocks hold the longest cached prefix of a prompt, and what lies just beyond it.

As in SGLang's RadixAttention (Zheng et al., 2023, https://arxiv.org/abs/2312.07104) an edge carries a run of tokens, split where
two paths part, at block boundaries (its page size). The tree says where content lies; who holds blocks and which goes is the pool's.
A node lives as long as a block of it is cached.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from kvlab.cache.shareable import common_prefix_len

Tokens: TypeAlias = "array[int]"
"""Packed 32-bit token ids: compared at memory speed, four bytes a token."""
Dump: TypeAlias = "list[tuple[list[int], list[int], Dump]]"


def pack(tokens: list[int] | tuple[int, ...]) -> Tokens:
    """Token ids, each in [0, 2^32), packed."""
    return array("I", tokens)


class TreeMatch(NamedTuple):
    """Blocks of the longest cached prefix; `source`: a cached block that begins with the `num_beyond` tokens after it (-1, 0: none)."""

    block_ids: list[int]
    source: int
    num_beyond: int


class Node:
    """A run of whole blocks in which no two paths part. `tokens` holds a block size's worth for each of `block_ids`.

    `children`: by the packed bytes of their first block; `firsts`: the same bytes sorted, so that those which share most stand
    together. The root of a salt is a node without blocks; `name` is its key.
    """

    __slots__ = ("block_ids", "children", "firsts", "name", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: Tokens, block_ids: list[int], name: bytes = b"") -> None:
        self.parent = parent
        self.tokens = tokens
        self.block_ids = block_ids
        self.name = name
        self.children: dict[bytes, Node] = {}
        self.firsts: list[bytes] = []


class RadixTree:
    """Paths of cached blocks, one tree a root key (a salt). `block_size`: tokens per block, the granularity of matches and splits.

    `match` costs a comparison at memory speed per token and a dictionary look-up per node; `insert` and `remove` touch their blocks,
    and an insert that parts a run also the run's blocks above.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.roots: dict[bytes, Node] = {}
        self._node_of: dict[int, Node] = {}

    def __len__(self) -> int:
        """Blocks in it."""
        return len(self._node_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._node_of

    def match(self, root: bytes, tokens: Tokens, num_tokens: int, beyond: bool = True) -> TreeMatch:
        """The longest cached path of whole blocks that begins as `tokens` does, within the first `num_tokens`; if asked for, what lies
        `beyond` it."""
        size, block_ids, at = self.block_size, list[int](), 0
        most = num_tokens // size * size
        node = self.roots.get(root)
        while node is not None:
            child = node.children.get(tokens[at : at + size].tobytes()) if at < most else None
            if child is None:
                if not beyond:
                    break
                return TreeMatch(block_ids, *self._beyond(node, tokens[at : min(at + size, num_tokens)]))
            run = child.tokens
            wanted = tokens[at : min(at + len(run), most)]
            if wanted != run:
                common = common_prefix_len(run, wanted) // size
                block_ids += child.block_ids[:common]
                if not beyond:
                    break
                at += common * size
                rest = tokens[at : min(at + size, num_tokens)]
                num_beyond = common_prefix_len(run[common * size : (common + 1) * size], rest)
                return TreeMatch(block_ids, child.block_ids[common] if num_beyond else -1, num_beyond)
            block_ids += child.block_ids
            at += len(run)
            node = child
        return TreeMatch(block_ids, -1, 0)

    def _beyond(self, node: Node, rest: Tokens) -> tuple[int, int]:
        """(a block right below `node`, how many tokens of `rest` it begins with) where that is most; (-1, 0): none."""
        best, num_best, wanted = -1, 0, rest.tobytes()
        at = bisect_left(node.firsts, wanted)
        for first in node.firsts[max(0, at - 1) : at + 1]:
            num_shared = common_prefix_len(first, wanted) // rest.itemsize
            if num_shared > num_best:
                best, num_best = node.children[first].block_ids[0], num_shared
        return best, num_best

    def child(self, root: bytes, parent_id: int, tokens: Tokens) -> int:
        """The block with `tokens` right after `parent_id` (-1: first of a prompt); -1: none."""
        node = self.roots.get(root) if parent_id < 0 else self._node_of.get(parent_id)
        if node is None:
            return -1
        at = node.block_ids.index(parent_id) + 1 if parent_id >= 0 else 0
        if at < len(node.block_ids):
            return node.block_ids[at] if node.tokens[at * self.block_size : (at + 1) * self.block_size] == tokens else -1
        child = node.children.get(tokens.tobytes())
        return -1 if child is None else child.block_ids[0]

    def insert(self, root: bytes, parent_id: int, block_ids: list[int], tokens: Tokens) -> bool:
        """A run of blocks with `tokens` was cached after the block `parent_id` (-1: it begins a prompt). False: that is not in the tree,
        so nothing that follows it can be found."""
        if parent_id < 0:
            node = self.roots.get(root)
            if node is None:
                node = self.roots[root] = Node(None, pack(()), [], root)
        else:
            found = self._node_of.get(parent_id)
            if found is None:
                return False
            node = found
            if node.block_ids[-1] != parent_id:
                node = self._split(node, node.block_ids.index(parent_id) + 1)
            elif not node.children:  # the run goes on
                node.tokens += tokens
                node.block_ids += block_ids
                self._node_of.update(dict.fromkeys(block_ids, node))
                return True
        child = self._hang(node, Node(node, tokens[:], block_ids[:]))
        self._node_of.update(dict.fromkeys(block_ids, child))
        return True

    def _hang(self, node: Node, child: Node) -> Node:
        first = self._first(child)
        assert first not in node.children, "a run is cached once"
        node.children[first] = child
        if self.block_size > 1:  # nothing is shared below a block of one token
            insort(node.firsts, first)
        return child

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Part a run after `num_blocks` blocks; returns the new node above, which the old one hangs from."""
        cut, parent = num_blocks * self.block_size, node.parent
        assert parent is not None
        above = Node(parent, node.tokens[:cut], node.block_ids[:num_blocks])
        parent.children[self._first(above)] = above
        node.parent, node.tokens, node.block_ids = above, node.tokens[cut:], node.block_ids[num_blocks:]
        self._hang(above, node)
        self._node_of.update(dict.fromkeys(above.block_ids, above))
        return above

    def _first(self, node: Node) -> bytes:
        return node.tokens[: self.block_size].tobytes()

    def remove(self, block_id: int) -> None:
        """The block is gone. What lay below it, if anything did, is in the tree no more: it can't be found without the block. Nodes
        left with one child are not joined."""
        node = self._node_of.get(block_id)
        if node is None:
            return  # not found any more before it went
        at = len(node.block_ids) - 1
        if node.block_ids[at] != block_id:
            at = node.block_ids.index(block_id)
        elif at and not node.children:  # the tail of a leaf, as a rule
            del self._node_of[block_id], node.block_ids[at], node.tokens[at * self.block_size :]
            return
        first = self._first(node)
        for gone in (*node.block_ids[at:], *_below(node)):
            del self._node_of[gone]
        node.children.clear()
        node.firsts.clear()
        del node.block_ids[at:], node.tokens[at * self.block_size :]
        parent = node.parent
        if node.block_ids or parent is None:
            return
        del parent.children[first]
        if parent.firsts:
            del parent.firsts[bisect_left(parent.firsts, first)]
        if parent.parent is None and not parent.children:
            del self.roots[parent.name]

    def dump(self, root: bytes) -> Dump:
        """The tree of a root as nested (tokens, block ids, children), children by their first block's tokens."""
        return self._dump(self.roots[root]) if root in self.roots else []

    def _dump(self, node: Node) -> Dump:
        rows = [(child.tokens.tolist(), list(child.block_ids), self._dump(child)) for child in node.children.values()]
        return sorted(rows, key=lambda row: row[0])


def _below(node: Node) -> Iterator[int]:
    """Blocks of all nodes below."""
    todo = list(node.children.values())
    while todo:
        below = todo.pop()
        yield from below.block_ids
        todo += below.children.values()
