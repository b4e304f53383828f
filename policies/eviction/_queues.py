"""Parts that several policies share: queues that pass over held blocks, and lists of what was evicted."""

from __future__ import annotations

from collections import OrderedDict


class FifoQueue:
    """Block ids in order of arrival. Those that are ready (no table holds them) are found at memory speed, however many are not;
    who is held keeps its place. All O(1), amortized."""

    __slots__ = ("_first", "_order", "_place", "_ready")

    def __init__(self) -> None:
        self._order: list[int] = []  # by place: a block id; places of those that left are not used again
        self._ready = bytearray()  # by place
        self._place: dict[int, int] = {}  # block id -> its place, in order of places
        self._first = 0  # no ready one lies below

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._place

    def push(self, block_id: int, ready: bool) -> None:
        """Put it at the end."""
        if len(self._order) > 2 * len(self._place) + 16:
            self._compact()
        self._place[block_id] = len(self._order)
        self._order.append(block_id)
        self._ready.append(ready)

    def set_ready(self, block_id: int) -> None:
        """No table holds it any more."""
        place = self._place[block_id]
        self._ready[place] = 1
        if place < self._first:
            self._first = place

    def set_held(self, block_id: int) -> None:
        """A table holds it."""
        self._ready[self._place[block_id]] = 0

    def remove(self, block_id: int) -> None:
        """It leaves the queue."""
        self._ready[self._place.pop(block_id)] = 0

    def oldest(self) -> int:
        """The ready one that came first; -1: none is ready."""
        place = self._ready.find(1, self._first)
        self._first = place if place >= 0 else len(self._order)
        return self._order[place] if place >= 0 else -1

    def _compact(self) -> None:
        self._ready = bytearray(map(self._ready.__getitem__, self._place.values()))
        self._order = list(self._place)
        self._place = {block_id: place for place, block_id in enumerate(self._order)}
        self._first = 0


class Ghosts:
    """Contents of the blocks evicted last, at most `capacity`; the oldest is forgotten."""

    __slots__ = ("_capacity", "_contents")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._contents: OrderedDict[bytes, None] = OrderedDict()

    def add(self, content: bytes) -> None:
        """Its block was evicted."""
        self._contents[content] = None
        if len(self._contents) > self._capacity:
            self._contents.popitem(last=False)

    def take(self, content: bytes) -> bool:
        """Whether it is remembered; it is no more from now on."""
        if content in self._contents:
            del self._contents[content]
            return True
        return False


class SegmentedLru:
    """Two LRU lists: probation for blocks never hit in here, protected for the others. Held blocks count but lie in no list: they
    return at the end when they are let go. What exceeds `protected_capacity` falls back to the end of probation."""

    __slots__ = ("_is_protected", "_num_protected", "_probation", "_protected", "_protected_capacity")

    def __init__(self, protected_capacity: int) -> None:
        self._protected_capacity = protected_capacity
        self._is_protected: dict[int, bool] = {}  # members, held ones too
        self._num_protected = 0
        self._probation: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._protected: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._is_protected

    def insert(self, block_id: int, held: bool) -> None:
        """A new member, on probation."""
        self._is_protected[block_id] = False
        if not held:
            self._probation[block_id] = None

    def hit(self, block_id: int) -> None:
        """It is used and held, and protected from now on."""
        if self._is_protected[block_id]:
            self._protected.pop(block_id, None)
        else:
            self._probation.pop(block_id, None)
            self._is_protected[block_id] = True
            self._num_protected += 1

    def release(self, block_id: int) -> None:
        """It is no longer held."""
        if not self._is_protected[block_id]:
            self._probation[block_id] = None
            return
        self._protected[block_id] = None
        while self._num_protected > self._protected_capacity and self._protected:
            demoted = self._protected.popitem(last=False)[0]
            self._is_protected[demoted] = False
            self._num_protected -= 1
            self._probation[demoted] = None

    def remove(self, block_id: int) -> None:
        """No member any more."""
        if self._is_protected.pop(block_id):
            self._num_protected -= 1
            self._protected.pop(block_id, None)
        else:
            self._probation.pop(block_id, None)

    def victim(self) -> int:
        """The least recently used on probation, else of the protected; -1: all are held."""
        return next(iter(self._probation or self._protected), -1)
