"""Placing in runs of consecutive free blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import FreeView


def first_fit(num_blocks: int, free: FreeView) -> list[int] | None:
    """The lowest run of `num_blocks` free ids."""
    if num_blocks == 0:
        return []
    first = free.first_run(num_blocks)
    return None if first is None else list(range(first, first + num_blocks))


def extend_or_fit(region: Sequence[int], num_blocks: int, free: FreeView) -> list[int] | None:
    """The region and what follows it, where that is free; else the lowest run, its own blocks being free too."""
    available, first = free.also(region), region[0]
    if any(start <= first and first + num_blocks <= start + length for start, length in available.runs()):
        return list(range(first, first + num_blocks))
    return first_fit(num_blocks, available)


def longest_run(free: FreeView) -> int:
    """Length of the longest run of free blocks."""
    return max((length for _, length in free.runs()), default=0)
