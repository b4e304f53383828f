"""Which cached blocks begin a sequence, and the publication of its own: by content keys or by a radix tree of tokens, as the policy says.

A block's content key is in both cases the policy's chained key: it names the block in events, traces and duplicates. With keys a
look-up asks for one block after the other; with a tree it walks tokens and hashes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from kvlab.cache.pool import BlockPool
from kvlab.cache.radix import RadixTree
from kvlab.cache.shareable import ShareableIndex
from kvlab.cache.table import BlockTable, Seq
from kvlab.policies.base import PrefixCachePolicy


class PrefixMatch(NamedTuple):
    """What of a sequence need not be computed.

    Attributes:
        block_ids: cached blocks of its longest contiguous prefix, full ones. num_tokens: tokens found, those of `source` included.
        source: a cached block whose first tokens are the next ones, to be copied from (-1: none).
        num_found_blocks: full blocks that are cached, also where they are too few to be used.
    """

    block_ids: list[int]
    num_tokens: int
    source: int = -1
    num_found_blocks: int = 0


class PrefixCache:
    """Look-up and publication of one pool's content.

    Args:
        policy: what is the same. pool: whose blocks. track_shareable: count tokens that were cached but lost to block granularity.
        let_go: how a sequence gives up blocks (`KVCacheManager.let_go`).
    """

    def __init__(self, policy: PrefixCachePolicy, pool: BlockPool, track_shareable: bool,
                 let_go: Callable[[Sequence[int], Seq], None]) -> None:  # fmt: skip
        self._let_go = let_go
        self.policy = policy
        self.pool = pool
        self.block_size = pool.block_size
        self._root: tuple[str | None, bytes] = (None, b"")  # of the salt asked for last
        self.tree = RadixTree(pool.block_size) if policy.enabled and policy.token_tree else None
        self.track_shareable = track_shareable
        self.shareable = ShareableIndex() if policy.enabled and track_shareable and self.tree is None else None
        if self.tree is not None or self.shareable is not None:
            pool.on_forget = self._forget
        self._on_change: Callable[[bytes, bytes | None], None] | None = None

    def watch(self, on_change: Callable[[bytes, bytes | None], None]) -> None:
        """Call `on_change` with the key and the parent's key of each block that can be found from now on, or no longer."""
        self._on_change = on_change
        self.pool.on_forget = self._forget

    def _forget(self, content: bytes) -> None:
        if self._on_change is not None:
            self._on_change(content, self.pool.by_content[content].parent)
        if self.tree is not None:
            self.tree.remove(self.pool.by_content[content].block_id)
        if self.shareable is not None:
            self.shareable.discard(content)

    # ------------------------------------------------------------ content keys

    def root(self, seq: Seq) -> bytes:
        """Key before the first block."""
        salt = seq.group.request.cache_salt
        if salt != self._root[0]:
            self._root = (salt, self.policy.root(salt))
        return self._root[1]

    def extend_keys(self, seq: Seq, num_blocks: int) -> None:
        """Make sure that `seq.keys` holds the keys of its first `num_blocks` blocks."""
        keys, tokens, size = seq.keys, seq.tokens, self.block_size
        while len(keys) < num_blocks:
            i = len(keys)
            keys.append(self.policy.key(keys[-1] if keys else self.root(seq), tokens[i * size : (i + 1) * size]))

    def keys(self, seq: Seq) -> list[bytes]:
        """Content keys of the full blocks up to the last token but one; empty without a prefix cache."""
        if not self.policy.enabled:
            return []
        most = (len(seq.tokens) - 1) // self.block_size
        self.extend_keys(seq, most)
        return seq.keys[:most]

    # ----------------------------------------------------------------- look-up

    def match(self, seq: Seq, num_tokens: int) -> PrefixMatch:
        """The longest cached prefix of `seq` within its first `num_tokens`; changes nothing."""
        if not self.policy.enabled:
            return PrefixMatch([], 0)
        found = self._by_keys(seq, num_tokens) if self.tree is None else self._by_tokens(self.tree, seq, num_tokens)
        if found.num_tokens < self.policy.min_match_tokens:
            return PrefixMatch([], 0, num_found_blocks=found.num_found_blocks)
        return found

    def _by_keys(self, seq: Seq, num_tokens: int) -> PrefixMatch:
        most = num_tokens // self.block_size
        self.extend_keys(seq, most)
        hits: list[int] = []
        find = self.pool.by_content.get
        for key in seq.keys[:most]:
            block = find(key)
            if block is None:
                break
            hits.append(block.block_id)
        return PrefixMatch(hits, len(hits) * self.block_size, num_found_blocks=len(hits))

    def _by_tokens(self, tree: RadixTree, seq: Seq, num_tokens: int) -> PrefixMatch:
        self._pack(seq, num_tokens)
        copies = self.policy.partial_block_copy
        block_ids, source, num_beyond = tree.match(self.root(seq), seq.packed, num_tokens, beyond=copies)
        return PrefixMatch(block_ids, len(block_ids) * self.block_size + num_beyond, source, len(block_ids))

    @staticmethod
    def _pack(seq: Seq, num_tokens: int) -> None:
        """Make sure that `seq.packed` holds its first `num_tokens` tokens."""
        packed = seq.packed
        if len(packed) < num_tokens:
            packed.extend(seq.tokens[len(packed) :])

    def num_shareable_lost(self, seq: Seq, match: PrefixMatch) -> int:
        """Tokens after a match that some cached block also holds, in a block that does not match as a whole."""
        most = len(seq.tokens) - 1
        if self.tree is not None and self.track_shareable and not self.policy.partial_block_copy:
            self._pack(seq, most)
            return self.tree.match(self.root(seq), seq.packed, most).num_beyond
        if self.shareable is None:
            return 0
        size, num_found = self.block_size, match.num_found_blocks
        rest = tuple(seq.tokens[num_found * size : min((num_found + 1) * size, most)])
        return self.shareable.num_shared(seq.keys[num_found - 1] if num_found else self.root(seq), rest) if rest else 0

    # ------------------------------------------------------------- publication

    def publish(self, seq: Seq, table: BlockTable) -> None:
        """Offer every block of `seq` that is full of computed tokens that may be cached: those its request keeps out may not, nor
        generated ones where the policy says so."""
        full = seq.num_computed // self.block_size
        if not self.policy.enabled or full <= table.num_full:
            return
        first, table.num_full = table.num_full, full
        if not self.policy.cache_generated:
            full = min(full, seq.group.num_prompt_tokens // self.block_size)
        full = min(full, seq.group.num_cacheable_tokens // self.block_size)
        self.extend_keys(seq, full)
        held = table.held(first, full)
        if self.tree is not None:
            for part in held:
                self._publish_in_tree(self.tree, seq, table, *part)
            return
        for i in chain.from_iterable(range(*part) for part in held):
            if self._publish_block(seq, table, i) and self.shareable is not None:
                tokens = tuple(seq.tokens[i * self.block_size : (i + 1) * self.block_size])
                self.shareable.add(seq.keys[i], seq.keys[i - 1] if i else self.root(seq), tokens)

    def _publish_block(self, seq: Seq, table: BlockTable, i: int) -> bool:
        """Name block `i` of a sequence. False: it is named, or another block has its content."""
        block_id = table.block_ids[table.index(i)]
        if self.pool.blocks[block_id].content:
            return False
        parent = seq.keys[i - 1] if i else None
        if self._on_change is not None:
            self._on_change(seq.keys[i], parent)
        return self.pool.publish(block_id, seq.keys[i], parent, i)

    def _publish_in_tree(self, tree: RadixTree, seq: Seq, table: BlockTable, first: int, full: int) -> None:
        """Runs of new blocks go into the tree. Where a content is cached already, the sequence takes that and gives up its own."""
        self._pack(seq, full * self.block_size)
        start = first  # from here on blocks are named and not yet in the tree
        for i in range(first, full):
            if not self._publish_block(seq, table, i):
                self._insert(tree, seq, table, start, i)
                start = i + 1
                if not self.pool.blocks[table.block_ids[table.index(i)]].content:
                    self._adopt(tree, seq, table, i)
        self._insert(tree, seq, table, start, full)

    def _insert(self, tree: RadixTree, seq: Seq, table: BlockTable, start: int, end: int) -> None:
        if start < end:
            at = table.index(start)
            block_ids = table.block_ids[at : at + end - start]
            tokens = seq.packed[start * self.block_size : end * self.block_size]
            tree.insert(self.root(seq), self._parent_id(seq, table, start), block_ids, tokens)

    def _parent_id(self, seq: Seq, table: BlockTable, i: int) -> int:
        """The cached block before block `i`: -1 for the first, one past the pool's last where there is none (a window gave it up)."""
        if not i:
            return -1
        at = table.index(i - 1)
        if at >= 0:
            return table.block_ids[at]
        block = self.pool.by_content.get(seq.keys[i - 1])
        return self.pool.num_blocks if block is None else block.block_id

    def _adopt(self, tree: RadixTree, seq: Seq, table: BlockTable, i: int) -> None:
        """Take the block that holds the content of block `i` already; the sequence's own is free again."""
        root, parent_id = self.root(seq), self._parent_id(seq, table, i)
        tokens = seq.packed[i * self.block_size : (i + 1) * self.block_size]
        cached = self.pool.by_content[seq.keys[i]].block_id
        if cached in tree and tree.child(root, parent_id, tokens) != cached:
            return  # a key that collides: its tokens are others
        at = table.index(i)
        own, table.block_ids[at] = table.block_ids[at], cached
        self.pool.adopt(cached)
        self._let_go((own,), seq)
        table.num_sent = -1
        if cached not in tree:
            if self._on_change is not None:
                self._on_change(seq.keys[i], seq.keys[i - 1] if i else None)
            tree.insert(root, parent_id, [cached], tokens)
