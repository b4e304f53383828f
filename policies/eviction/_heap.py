"""A heap of block ids by key, from which any may be dropped."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator

Key = tuple[float, ...]


class KeyHeap:
    """Block ids, smallest key first. O(log n) an operation, amortized; keys must differ."""

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int]] = []  # some entries are stale
        self._live: dict[int, tuple[Key, int]] = {}  # block id -> its entry

    @classmethod
    def of(cls, keys: Iterable[tuple[Key, int]]) -> KeyHeap:
        """A heap of these (key, block id), in O(n)."""
        made = cls()
        made._heap = list(keys)
        made._live = {entry[1]: entry for entry in made._heap}
        heapq.heapify(made._heap)
        return made

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._live

    def __iter__(self) -> Iterator[int]:
        return iter(self._live)

    def entries(self) -> Collection[tuple[Key, int]]:
        """(key, block id) of all, in no order but the same in every run."""
        return self._live.values()

    def push(self, block_id: int, key: Key) -> None:
        """Put it in, or give it another key."""
        entry = (key, block_id)
        self._live[block_id] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def drop(self, block_id: int) -> bool:
        """Take it out; whether it was in."""
        return self._live.pop(block_id, None) is not None

    def first(self) -> int:
        """Who has the smallest key; there must be one."""
        return self.first_entry()[1]

    def first_entry(self) -> tuple[Key, int]:
        """The smallest key and who has it."""
        heap, live = self._heap, self._live
        while live.get(heap[0][1]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0]
