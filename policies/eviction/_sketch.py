"""A count-min sketch of how often contents were used lately."""

from __future__ import annotations

from zlib import crc32

MAX_COUNT = 15
"""Four bits."""
_MULTIPLIER = 0x9E3779B97F4A7C15
_HALVED = bytes(count >> 1 for count in range(256))

Places = tuple[int, int, int, int]
"""A content's counter in each row."""


class FrequencySketch:
    """Four rows of counters of four bits; a content's count is the smallest of its four. After `sample` uses all counts are halved.

    Args:
        capacity: contents that it should tell apart; each row has at least four counters for each. sample: uses.
    """

    __slots__ = ("_mask", "_num_added", "_rows", "_sample")

    def __init__(self, capacity: int, sample: int) -> None:
        size = 1 << max(4, (4 * capacity - 1).bit_length())
        self._mask = size - 1
        self._rows = [bytearray(size) for _ in range(4)]
        self._sample = max(1, sample)
        self._num_added = 0

    def places(self, content: bytes) -> Places:
        """Where a content is counted. The four places follow from two halves of one product (Kirsch and Mitzenmacher, ESA 2006)."""
        mixed, mask = crc32(content) * _MULTIPLIER, self._mask
        first, step = mixed >> 20 & 0xFFFFFFFF, mixed >> 52 & 0xFFFFFFF | 1
        return first & mask, (first + step) & mask, (first + 2 * step) & mask, (first + 3 * step) & mask

    def add(self, places: Places) -> None:
        """One more use."""
        first, second, third, fourth = places
        a, b, c, d = self._rows
        if a[first] < MAX_COUNT:
            a[first] += 1
        if b[second] < MAX_COUNT:
            b[second] += 1
        if c[third] < MAX_COUNT:
            c[third] += 1
        if d[fourth] < MAX_COUNT:
            d[fourth] += 1
        self._num_added += 1
        if self._num_added >= self._sample:
            self._rows = [row.translate(_HALVED) for row in self._rows]
            self._num_added //= 2

    def count(self, places: Places) -> int:
        """Uses, at most 15, rather too many than too few since the last halving."""
        first, second, third, fourth = places
        a, b, c, d = self._rows
        return min(a[first], b[second], c[third], d[fourth])
