"""W-TinyLFU."""

from __future__ import annotations

from collections import OrderedDict

from kvlab.policies.base import EvictionPolicy, is_number, require
from kvlab.policies.eviction._queues import SegmentedLru
from kvlab.policies.eviction._sketch import FrequencySketch, Places
from kvlab.types import BlockView, Now


class WTinyLfu(EvictionPolicy):
    """New blocks enter a small LRU window; what falls out of it replaces the next victim of the main part (a segmented LRU) only if a
    sketch counted more recent uses of it, else it goes itself.

    Source: Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy" (ACM TOS 13(4), 2017),
        https://doi.org/10.1145/3149371
    Parameters: window: share of the pool (at least one block), in (0, 1). protected: share of the main part, in (0, 1). sample: uses
        after which all counts are halved, as a multiple of the pool's blocks, at least 1.
    Deviations: no doorkeeper in front of the sketch, all four counters of a content are raised, and a tie is lost by the newcomer. A
        block's first use is counted when it is inserted, after room was made for it. Being let go is a use, as in lru.
    """

    def __init__(self, window: float = 0.01, protected: float = 0.8, sample: float = 10) -> None:
        require(is_number(window) and 0 < window < 1, self, "window", window, "a share in (0, 1)")
        require(is_number(protected) and 0 < protected < 1, self, "protected", protected, "a share in (0, 1)")
        require(is_number(sample) and 1 <= sample < 1e9, self, "sample", sample, "a number of at least 1")
        self.window = window
        self.protected = protected
        self.sample = sample
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.bind(0)

    def bind(self, num_blocks: int) -> None:
        """Sizes of the parts and of the sketch."""
        self._window_capacity = max(1, int(self.window * num_blocks))
        self._main = SegmentedLru(int(self.protected * (num_blocks - self._window_capacity)))
        self._window: OrderedDict[int, None] = OrderedDict()  # candidates, least recently used first
        self._num_window = 0  # with those held
        self._sketch = FrequencySketch(num_blocks, int(self.sample * num_blocks))
        self._places: dict[int, Places] = {}  # of a block's content in the sketch

    def insert(self, block: BlockView, now: Now) -> None:
        """Into the window; what falls out of it moves to the main part (it has won, or there was room)."""
        self._places[block.block_id] = places = self._sketch.places(block.content)
        self._sketch.add(places)
        self._num_window += 1
        self._overflow()

    def hit(self, block: BlockView, now: Now) -> None:
        """Counted."""
        self._sketch.add(self._places[block.block_id])
        if block.block_id in self._main:
            self._main.hit(block.block_id)
        else:
            self._window.pop(block.block_id, None)

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """The most recently used of its part."""
        if block.block_id in self._main:
            self._main.release(block.block_id)
        else:
            self._window[block.block_id] = None
            self._overflow()

    def _overflow(self) -> None:
        while self._num_window > self._window_capacity and self._window:
            self._num_window -= 1
            self._main.insert(self._window.popitem(last=False)[0], held=False)

    def victim(self, now: Now) -> int:
        """With a full window: of its oldest and the main part's next victim the one used less, else the latter."""
        oldest, victim = next(iter(self._window), -1), self._main.victim()
        if oldest < 0 or (victim >= 0 and self._num_window < self._window_capacity):
            return victim
        if victim < 0 or self._sketch.count(self._places[oldest]) <= self._sketch.count(self._places[victim]):
            return oldest
        return victim

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone; the sketch still counts it."""
        del self._places[block.block_id]
        if block.block_id in self._main:
            self._main.remove(block.block_id)
        else:
            self._window.pop(block.block_id, None)
            self._num_window -= 1
