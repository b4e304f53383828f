"""Which cached blocks begin a sequence, and the publication of its own: by content keys or by a radix tree of tokens, as the policy says.

A block's content key is in both cases the policy's chained key: it names the block in events, traces and duplicates. With keys a
look-up asks for one block after the other; with a tree it walks tokens and hashes nothing.
"""

from __future__ import annotations

from array import array
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
        num_lost: tokens that a cached block shares beyond those found, and that are computed all the same; -1: not looked for.
    """

    block_ids: list[int]
    num_tokens: int
    source: int = -1
    num_lost: int = -1


class PrefixCache:
    """Look-up and publication of one pool's content.

    Args:
        policy: what is the same. pool: whose blocks. track_shareable: count tokens that were cached but lost to block granularity.
    """

    def __init__(self, policy: PrefixCachePolicy, pool: BlockPool, track_shareable: bool) -> None:
        self.policy = policy
        self.pool = pool
        self.block_size = pool.block_size
        self._root: tuple[str | None, bytes] = (None, b"")  # of the salt asked for last
        self.tree = RadixTree(pool.block_size) if policy.enabled and policy.token_tree else None
        self.shareable = ShareableIndex() if policy.enabled and track_shareable and self.tree is None else None
        if self.tree is not None or self.shareable is not None:
            pool.on_forget = self._forget

    def _forget(self, content: bytes) -> None:
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
            return PrefixMatch([], 0, num_lost=0)
        found = self._by_keys(seq, num_tokens) if self.tree is None else self._by_tokens(self.tree, seq, num_tokens)
        if found.num_tokens < self.policy.min_match_tokens:
            return PrefixMatch([], 0, num_lost=self.num_shareable_lost(seq, found))
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
        return PrefixMatch(hits, len(hits) * self.block_size)

    def _by_tokens(self, tree: RadixTree, seq: Seq, num_tokens: int) -> PrefixMatch:
        packed = seq.packed
        if len(packed) < num_tokens:
            packed.extend(seq.tokens[len(packed) :])
        block_ids, source, num_beyond = tree.match(self.root(seq), packed, num_tokens)
        num_whole = len(block_ids) * self.block_size
        if self.policy.partial_block_copy:
            return PrefixMatch(block_ids, num_whole + num_beyond, source, 0)
        return PrefixMatch(block_ids, num_whole, -1, num_beyond)

    def num_shareable_lost(self, seq: Seq, match: PrefixMatch) -> int:
        """Tokens after a match that some cached block also holds, in a block that does not match as a whole."""
        if match.num_lost >= 0 or self.shareable is None:
            return max(0, match.num_lost)
        size, num_hits = self.block_size, len(match.block_ids)
        rest = tuple(seq.tokens[num_hits * size : min((num_hits + 1) * size, len(seq.tokens) - 1)])
        return self.shareable.num_shared(seq.keys[num_hits - 1] if num_hits else self.root(seq), rest) if rest else 0

    # ------------------------------------------------------------- publication

    def publish(self, seq: Seq, table: BlockTable) -> None:
        """Offer every block of `seq` that is full of computed tokens (and of its prompt's, where generated ones are not cached)."""
        full = seq.num_computed // self.block_size
        if not self.policy.enabled or full <= table.num_full:
            return
        first, table.num_full = max(table.num_full, table.num_dropped_blocks), full
        if not self.policy.cache_generated:
            full = min(full, seq.group.num_prompt_tokens // self.block_size)
        if self.tree is not None and not seq.keys:  # blocks that were found have names already
            seq.keys = [self.pool.blocks[block_id].content for block_id in table.block_ids[:first]]
        self.extend_keys(seq, full)
        for i in range(first, full):
            block_id, content = table.block_ids[i - table.num_dropped_blocks], seq.keys[i]
            if self.pool.blocks[block_id].content:
                continue
            parent = seq.keys[i - 1] if i else None
            is_first = self.pool.publish(block_id, content, parent, i)
            if self.tree is not None:
                self._hang(self.tree, seq, table, i, is_first)
            elif is_first and self.shareable is not None:
                tokens = tuple(seq.tokens[i * self.block_size : (i + 1) * self.block_size])
                self.shareable.add(content, parent or self.root(seq), tokens)

    def _hang(self, tree: RadixTree, seq: Seq, table: BlockTable, i: int, is_first: bool) -> None:
        """Put block `i` of a sequence into the tree; where its content is cached already, the sequence takes that and gives up its own."""
        at = i - table.num_dropped_blocks
        parent_id = table.block_ids[at - 1] if at else -1 if not i else self._id_of(seq.keys[i - 1])
        tokens = array("I", seq.tokens[i * self.block_size : (i + 1) * self.block_size])
        if is_first:
            tree.insert(self.root(seq), parent_id, table.block_ids[at], tokens)
            return
        cached = self.pool.by_content[seq.keys[i]].block_id
        if cached in tree and tree.child(self.root(seq), parent_id, tokens) != cached:
            return  # a key that collides: its tokens are others
        own, table.block_ids[at] = table.block_ids[at], cached
        self.pool.adopt(cached)
        self.pool.release((own,))
        table.num_sent = -1
        if cached not in tree:
            tree.insert(self.root(seq), parent_id, cached, tokens)

    def _id_of(self, content: bytes) -> int:
        """The block with a content; one past the pool's last where none has it."""
        block = self.pool.by_content.get(content)
        return self.pool.num_blocks if block is None else block.block_id
