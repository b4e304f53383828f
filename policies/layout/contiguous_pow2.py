"""One consecutive region a sequence, a power of two long, from a buddy allocator."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import FreeView, LayoutPolicy, RegionNeed


class ContiguousPow2(LayoutPolicy):
    """A sequence owns one region of 2^k consecutive blocks, at a multiple of its size; outgrown, it gets one twice as large.

    The free blocks are buddies: the largest aligned powers of two that are wholly free. The smallest that is large enough is taken (the
    lowest of several) and halved until it fits; freed halves become one again. A region doubles in place when its upper buddy is free,
    else it moves, by a copy.

    Source: "Orca (Pow2)" in Kwon et al., SOSP 2023, section 6.1, https://arxiv.org/abs/2309.06180, with the buddy allocator that the
        paper assumes (Knowlton, CACM 8(10), 1965).
    Parameters: none. The region is the next power of two of the blocks needed.
    Deviations: the paper's variant knows the output length up to a factor of 2; this one knows nothing, starts with what the prompt
        needs and doubles. A pool that is no power of two is cut into aligned powers of two.
    """

    shares_blocks = False
    is_contiguous = True

    def reserve_blocks(self, need: RegionNeed) -> int:
        """The next power of two."""
        return _pow2(need.num_blocks)

    def place(self, num_blocks: int, free: FreeView) -> list[int] | None:
        """The first part of the smallest free buddy that holds a power of two of `num_blocks`."""
        if num_blocks == 0:
            return []
        fitting = [(size, first) for first, size in buddies(free) if size >= num_blocks]
        if not fitting:
            return None
        _, first = min(fitting)
        return list(range(first, first + num_blocks))

    def regrow(self, region: Sequence[int], num_blocks: int, free: FreeView) -> list[int] | None:
        """In place where the region is the lower part of a larger one that is free; else where it fits, its own blocks being free too."""
        size, first = _pow2(num_blocks), region[0]
        available = free.also(region)
        if first % size == 0 and any(start <= first and first + size <= start + length for start, length in available.runs()):
            return list(range(first, first + num_blocks))
        return self.place(num_blocks, available)

    def largest_region(self, free: FreeView) -> int:
        """The largest buddy."""
        return max((size for _, size in buddies(free)), default=0)


def buddies(free: FreeView) -> list[tuple[int, int]]:
    """(first id, size) of the largest aligned powers of two that are wholly free, ascending."""
    found = []
    for first, length in free.runs():
        end = first + length
        while first < end:
            size = 1 << (end - first).bit_length() - 1  # what is left allows
            size = min(size, first & -first) if first else size  # what its place allows
            found.append((first, size))
            first += size
    return found


def _pow2(num_blocks: int) -> int:
    return 1 << (num_blocks - 1).bit_length() if num_blocks > 1 else num_blocks
