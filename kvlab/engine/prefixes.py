"""The prefix cache as a scheduling policy sees it (`PrefixesView`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvlab.cache.manager import KVCacheManager
from kvlab.engine.sequence import WAITING, SequenceGroup
from kvlab.types import GroupView


class Prefixes:
    """Look-ups that change nothing. What was found for a group is kept while it waits, until a block is cached or goes that changes it."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._keys: dict[int, tuple[bytes, ...]] = {}  # by group id
        self._found: dict[int, tuple[int, tuple[bytes, ...]]] = {}  # group id -> (cached tokens, last key found and first key missed)
        self._whose: dict[bytes, set[int]] = {}  # one of those keys -> group ids
        self._below: dict[bytes, set[bytes]] = {}  # a key that look-ups went through -> those found right after it

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._kv.block_size

    def keys(self, group: GroupView) -> Sequence[bytes]:
        """Content keys of its first sequence's full blocks, up to the last token but one."""
        keys = self._keys.get(group.group_id)
        if keys is None:
            held = cast(SequenceGroup, group)
            keys = tuple(self._kv.prefix_keys(held.seqs[0]))
            if held.status is WAITING:
                self._keys[group.group_id] = keys
        return keys

    def num_cached_tokens(self, group: GroupView) -> int:
        """Tokens of the longest cached prefix."""
        found = self._found.get(group.group_id)
        return self._look_up(cast(SequenceGroup, group)) if found is None else found[0]

    def forget(self, group: SequenceGroup) -> None:
        """It waits no longer."""
        self._keys.pop(group.group_id, None)
        self._void(group.group_id)

    def _look_up(self, group: SequenceGroup) -> int:
        seq, cache = group.seqs[0], self._kv.prefixes
        match = self._kv.match_prefix(seq, len(seq.tokens) - 1)
        # What slots keep, and a block of which a part is copied, depends on more than keys.
        if group.status is WAITING and self._kv.regions is None and not cache.policy.partial_block_copy:
            cache.watch(self._changed)
            self._keep(group, match.num_tokens, match.num_found_blocks)
        return match.num_tokens

    def _keep(self, group: SequenceGroup, num_tokens: int, num_found: int) -> None:
        """It holds until the block that was missed is cached, or one that was found goes."""
        keys = self.keys(group)
        ends = tuple(keys[max(0, num_found - 1) : num_found + 1])
        self._found[group.group_id] = num_tokens, ends
        for key in ends:
            self._whose.setdefault(key, set()).add(group.group_id)
        for i in range(num_found - 1, 0, -1):
            below = self._below.setdefault(keys[i - 1], set())
            if keys[i] in below:
                break
            below.add(keys[i])

    def _changed(self, key: bytes, parent: bytes | None) -> None:
        """A block with this content was cached, or is gone: look-ups that ended at it, or went through it, are void."""
        if parent is not None and parent in self._below:
            self._below[parent].discard(key)
        todo = [key]
        while todo:
            key = todo.pop()
            for group_id in tuple(self._whose.get(key, ())):
                self._void(group_id)
            todo += self._below.pop(key, ())

    def _void(self, group_id: int) -> None:
        _, ends = self._found.pop(group_id, (0, ()))
        for key in ends:
            whose = self._whose[key]
            whose.discard(group_id)
            if not whose:
                del self._whose[key]
