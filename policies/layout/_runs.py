"""Placing in runs of consecutive free blocks."""

from __future__ import annotations

from kvlab.policies.base import FreeView


def first_fit(num_blocks: int, free: FreeView) -> list[int] | None:
    """The lowest run of `num_blocks` free ids."""
    if num_blocks == 0:
        return []
    first = free.first_run(num_blocks)
    return None if first is None else list(range(first, first + num_blocks))


def longest_run(free: FreeView) -> int:
    """Length of the longest run of free blocks."""
    return max((length for _, length in free.runs()), default=0)
