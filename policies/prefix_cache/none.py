"""No prefix caching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvlab.policies.base import PrefixCachePolicy


class NoCache(PrefixCachePolicy):
    """No block is ever published or found: every request computes its whole prompt.

    Source: vLLM with `--no-enable-prefix-caching`.
    Parameters: none.
    Deviations: none.
    """

    enabled: ClassVar[bool] = False

    def root(self, cache_salt: str) -> bytes:
        """Never asked for."""
        raise RuntimeError("NoCache has no keys: look at `enabled` before asking a prefix cache for one")

    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Never asked for."""
        raise RuntimeError("NoCache has no keys: look at `enabled` before asking a prefix cache for one")
