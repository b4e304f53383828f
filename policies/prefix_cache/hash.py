"""Chained hashes of full blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from kvlab.policies.base import PrefixCachePolicy


class Hash(PrefixCachePolicy):
    """A block's key is SHA-256 of the key before it and its own tokens: equal keys mean equal tokens from the prompt's start.

    Source: vLLM's automatic prefix caching, https://docs.vllm.ai/en/latest/design/prefix_caching.html
    Parameters: none.
    Deviations: tokens are hashed as packed 32-bit numbers, not pickled (an id must be in [0, 2^32)). Salt and further keys go
        into the root, not into the first block, each with its length before it. Always cryptographic: no 64-bit keys to collide.
    """

    def root(self, cache_salt: str, *extra_keys: str) -> bytes:
        """32 bytes. `extra_keys`: what else keeps requests apart (an adapter's name); ("ab", "c") differs from ("a", "bc")."""
        parts = [text.encode() for text in (cache_salt, *extra_keys)]
        return sha256(b"kvlab root" + b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()

    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """32 bytes: SHA-256 of `parent` and the packed `token_ids`."""
        return sha256(parent + array("I", token_ids).tobytes()).digest()
