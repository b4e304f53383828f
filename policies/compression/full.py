"""Keep everything."""

from __future__ import annotations

from kvlab.policies.base import CompressionPolicy


class Full(CompressionPolicy):
    """All tokens stay in the cache.

    Source: attention as it is.
    Parameters: none.
    Deviations: none.
    """

    def num_droppable_tokens(self, num_computed_tokens: int) -> int:
        """None."""
        return 0
