"""Chained hashes of full blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import PrefixCachePolicy
from kvlab.policies.prefix_cache._keys import block_key, check_settings, root_key


class Hash(PrefixCachePolicy):
    """A block's key is SHA-256 of the key before it and its own tokens: equal keys mean equal tokens from the prompt's start.

    Source: vLLM's automatic prefix caching, https://docs.vllm.ai/en/latest/design/prefix_caching.html
    Parameters: min_match_tokens: a shorter cached prefix is not used (0: any is). cache_generated: false keeps blocks that hold
        generated tokens out of the cache, so only what lies wholly inside a prompt is found.
    Deviations: tokens are hashed as packed 32-bit numbers, not pickled (an id must be in [0, 2^32)). Salt and further keys go
        into the root, not into the first block, each with its length before it. Always cryptographic: no 64-bit keys to collide.
        Both parameters are not vLLM's.
    """

    def __init__(self, min_match_tokens: int = 0, cache_generated: bool = True) -> None:
        check_settings(self, min_match_tokens, cache_generated)
        self.min_match_tokens = min_match_tokens
        self.cache_generated = cache_generated

    def root(self, cache_salt: str, *extra_keys: str) -> bytes:
        """32 bytes. `extra_keys`: what else keeps requests apart (an adapter's name); ("ab", "c") differs from ("a", "bc")."""
        return root_key(cache_salt, *extra_keys)

    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """32 bytes: SHA-256 of `parent` and the packed `token_ids`."""
        return block_key(parent, token_ids)
