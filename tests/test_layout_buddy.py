"""The buddy allocator against one that keeps free lists, splits and merges as in the textbook."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache.free_blocks import FreeBlocks
from kvlab.policies.layout import ContiguousPow2
from kvlab.policies.layout.contiguous_pow2 import buddies


class Textbook:
    """Free lists by size; a pool that is no power of two begins as several aligned ones."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free: dict[int, set[int]] = {}
        first = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self.free.setdefault(1 << order, set()).add(first)
                first += 1 << order

    def allocate(self, size: int) -> int | None:
        fitting = sorted(s for s, firsts in self.free.items() if firsts and s >= size)
        if not fitting:
            return None
        have = fitting[0]
        first = min(self.free[have])
        self.free[have].remove(first)
        while have > size:  # keep the lower half, give the upper one
            have //= 2
            self.free.setdefault(have, set()).add(first + have)
        return first

    def release(self, first: int, size: int) -> None:
        while (first ^ size) in self.free.get(size, set()):
            self.free[size].remove(first ^ size)
            first, size = min(first, first ^ size), 2 * size
        self.free.setdefault(size, set()).add(first)

    def buddies(self) -> list[tuple[int, int]]:
        return sorted((first, size) for size, firsts in self.free.items() for first in firsts)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 70), st.lists(st.tuples(st.sampled_from(["take", "take", "give", "grow"]), st.integers(0, 40)), max_size=60))
def test_places_are_those_of_a_textbook_buddy_allocator(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    """Same places, aligned, no overlap; what is given back merges, so that in the end the pool is as it was."""
    layout, free, model = ContiguousPow2(), FreeBlocks(num_blocks), Textbook(num_blocks)
    start = buddies(free)
    held: list[list[int]] = []
    for operation, number in operations:
        if operation == "take":
            size = 1 << number % 6
            region, first = layout.place(size, free), model.allocate(size)
            assert region == (None if first is None else list(range(first, first + size)))
            if region is not None:
                assert region[0] % size == 0
                free.take(region)
                held.append(region)
        elif held:
            region = held.pop(number % len(held))
            size = len(region)
            is_upper_free = region[0] % (2 * size) == 0 and all(region[0] + size + i in free for i in range(size))
            larger = layout.regrow(region, 2 * size, free) if operation == "grow" else None
            for block_id in region:
                free.give(block_id)
            model.release(region[0], size)
            if operation == "grow":
                assert larger is None or (larger[0] % (2 * size) == 0 and all(block_id in free for block_id in larger))
                if is_upper_free:
                    assert larger == list(range(region[0], region[0] + 2 * size))  # in place
                    _carve(model, region[0], 2 * size)
                else:
                    first = model.allocate(2 * size)
                    assert larger == (None if first is None else list(range(first, first + 2 * size)))
                if larger is not None:
                    free.take(larger)
                    held.append(larger)
        assert buddies(free) == model.buddies()
        assert layout.largest_region(free) == max((size for _, size in model.buddies()), default=0)
        assert sorted(b for region in held for b in region) == [b for b in range(num_blocks) if b not in free]
    for region in held:
        for block_id in region:
            free.give(block_id)
    assert buddies(free) == start


def _carve(model: Textbook, first: int, size: int) -> None:
    """Take a particular place out of the free lists."""
    whole, have = next((f, s) for f, s in model.buddies() if f <= first and first + size <= f + s)
    model.free[have].remove(whole)
    while have > size:
        have //= 2
        lower, upper = whole, whole + have
        whole, other = (upper, lower) if first >= upper else (lower, upper)
        model.free.setdefault(have, set()).add(other)
