"""Blocks anywhere."""

from __future__ import annotations

from kvlab.policies.base import FreeView, LayoutPolicy


class Paged(LayoutPolicy):
    """A sequence's blocks lie anywhere, taken one by one as it grows: the lowest free ids.

    Source: PagedAttention (Kwon et al., SOSP 2023), https://arxiv.org/abs/2309.06180
    Parameters: none.
    Deviations: the lowest id first instead of a queue of free blocks, so that a run's block ids can be worked out by hand.
    """

    def place(self, num_blocks: int, free: FreeView) -> list[int] | None:
        """The lowest free ids, ascending."""
        return free.lowest(num_blocks) if num_blocks <= len(free) else None
