"""The free blocks of a pool, searched at memory speed, and whether a place that a layout chose among them is legal."""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.policies.base import LayoutPolicy
from kvlab.types import IllegalDecision


class FreeBlocks:
    """The free blocks of a pool, one byte each, so that searches run at memory speed. Satisfies `FreeView`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._is_free = bytearray(b"\x01") * num_blocks
        self._len = num_blocks
        self._hint = 0  # no free id lies below

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block_id: int) -> bool:
        return 0 <= block_id < len(self._is_free) and self._is_free[block_id] == 1

    def lowest(self, num_blocks: int) -> list[int]:
        """The `num_blocks` lowest free ids, ascending (fewer when there are fewer)."""
        found, start, find = [], self._hint, self._is_free.find
        for _ in range(num_blocks):
            block_id = find(1, start)
            if block_id < 0:
                break
            found.append(block_id)
            start = block_id + 1
        if found:
            self._hint = found[0]
        return found

    def take_lowest(self, num_blocks: int) -> list[int]:
        """The `num_blocks` lowest free ids, ascending, free no longer; there are so many."""
        found, start, is_free = [], self._hint, self._is_free
        for _ in range(num_blocks):
            block_id = is_free.index(1, start)
            is_free[block_id] = 0
            found.append(block_id)
            start = block_id + 1
        self._len -= num_blocks
        self._hint = start
        return found

    def first_run(self, num_blocks: int, start: int = 0) -> int | None:
        """First id of the lowest run of `num_blocks` consecutive free blocks from id `start` on; None when there is none."""
        first = self._is_free.find(b"\x01" * num_blocks, max(start, self._hint))
        return None if first < 0 else first

    def runs(self) -> list[tuple[int, int]]:
        """(first id, length) of each longest run of consecutive free blocks, ascending."""
        found, find = [], self._is_free.find
        first = find(1, self._hint)
        while first >= 0:
            end = find(0, first)
            end = self.num_blocks if end < 0 else end
            found.append((first, end - first))
            first = find(1, end)
        return found

    def also(self, block_ids: Iterable[int]) -> FreeBlocks:
        """A copy in which these blocks are free too."""
        copy = FreeBlocks(0)
        copy.num_blocks, copy._is_free, copy._len, copy._hint = self.num_blocks, self._is_free[:], self._len, self._hint
        for block_id in block_ids:
            copy.give(block_id)
        return copy

    def take(self, block_ids: Iterable[int]) -> None:
        """Mark as no longer free."""
        for block_id in block_ids:
            self._is_free[block_id] = 0
            self._len -= 1

    def give_all(self, block_ids: list[int]) -> None:
        """Mark as free."""
        is_free = self._is_free
        for block_id in block_ids:
            is_free[block_id] = 1
        self._len += len(block_ids)
        self._hint = min(self._hint, *block_ids)

    def give(self, block_id: int) -> None:
        """Mark as free."""
        self._is_free[block_id] = 1
        self._len += 1
        self._hint = min(self._hint, block_id)


def check_placed(layout: LayoutPolicy, block_ids: list[int], num_blocks: int, free: FreeBlocks) -> None:
    """IllegalDecision unless these are `num_blocks` different ids of `free` (consecutive, if the layout says so)."""
    if len(block_ids) == 1 == num_blocks and block_ids[0] in free:
        return
    if len(block_ids) != num_blocks or len(set(block_ids)) != num_blocks or not all(b in free for b in block_ids):
        raise IllegalDecision("layout", layout, f"placed {num_blocks} blocks at {block_ids[:8]}", f"{num_blocks} different free block ids")
    if layout.is_contiguous and block_ids and block_ids != list(range(block_ids[0], block_ids[0] + num_blocks)):
        raise IllegalDecision("layout", layout, f"placed {num_blocks} blocks at {block_ids[:8]}", "consecutive block ids")
