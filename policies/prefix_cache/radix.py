"""A radix tree of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvlab.policies.base import PrefixCachePolicy, require
from kvlab.policies.prefix_cache._keys import block_key, check_settings, root_key


class Radix(PrefixCachePolicy):
    """The longest cached prefix is found by walking a radix tree of tokens; its leaves are evicted first, and a block computed twice is
    kept once.

    Source: SGLang's RadixAttention, Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs" (2023),
        https://arxiv.org/abs/2312.07104
    Parameters: min_match_tokens: a shorter cached prefix is not used (0: any is). cache_generated: false keeps blocks that hold
        generated tokens out of the cache. partial_block_copy: where the next cached block begins with the prompt's next tokens and then
        differs, it is copied into the request's own block, and those tokens are not computed either.
    Deviations: the tree's page is the block (SGLang's default is 1 token: block_size=1). Blocks are cached as they fill, not when a
        request ends; one that is cached already gives way to the first, as there. Leaves first is a constraint on whichever eviction
        policy is set (see eviction=leaf_first). A path is matched by its tokens, but a block is *named* by the key of the hash
        chain, so that events, traces and replays of both are comparable. partial_block_copy and both other parameters are not SGLang's.
    """

    token_tree: ClassVar[bool] = True

    def __init__(self, min_match_tokens: int = 0, cache_generated: bool = True, partial_block_copy: bool = False) -> None:
        check_settings(self, min_match_tokens, cache_generated)
        require(isinstance(partial_block_copy, bool), self, "partial_block_copy", partial_block_copy, "true or false")
        self.min_match_tokens = min_match_tokens
        self.cache_generated = cache_generated
        self.partial_block_copy = partial_block_copy

    def root(self, cache_salt: str, *extra_keys: str) -> bytes:
        """32 bytes; each root has a tree of its own. `extra_keys`: what else keeps requests apart."""
        return root_key(cache_salt, *extra_keys)

    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """32 bytes, the block's name: SHA-256 of `parent` and the packed `token_ids`."""
        return block_key(parent, token_ids)
