"""The prefix cache as a scheduling policy sees it (`PrefixesView`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvlab.cache.manager import KVCacheManager
from kvlab.engine.sequence import SequenceGroup
from kvlab.types import GroupView


class Prefixes:
    """Look-ups that change nothing. Keys of a group are hashed once and kept with its sequence."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._kv.block_size

    def keys(self, group: GroupView) -> Sequence[bytes]:
        """Content keys of its first sequence's full blocks, up to the last token but one."""
        return self._kv.prefix_keys(cast(SequenceGroup, group).seqs[0])

    def num_cached_tokens(self, group: GroupView) -> int:
        """Tokens of the longest cached prefix."""
        seq = cast(SequenceGroup, group).seqs[0]
        return self._kv.match_prefix(seq, len(seq.tokens) - 1).num_tokens
