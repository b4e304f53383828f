"""Content keys that several policies share: chained SHA-256, and a root that keeps salts apart."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from kvlab.policies.base import is_whole, require


def root_key(*parts: str) -> bytes:
    """32 bytes from texts, each with its length before it: ("ab", "c") differs from ("a", "bc")."""
    encoded = [text.encode() for text in parts]
    return sha256(b"kvlab root" + b"".join(len(part).to_bytes(8, "little") + part for part in encoded)).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """32 bytes: SHA-256 of `parent` and the ids, packed as 32-bit numbers."""
    return sha256(parent + array("I", token_ids).tobytes()).digest()


def check_settings(policy: object, min_match_tokens: object, cache_generated: object) -> None:
    """UserError unless both settings are legal."""
    is_count = is_whole(min_match_tokens) and min_match_tokens >= 0
    require(is_count, policy, "min_match_tokens", min_match_tokens, "an integer of at least 0 (tokens)")
    require(isinstance(cache_generated, bool), policy, "cache_generated", cache_generated, "true or false")
