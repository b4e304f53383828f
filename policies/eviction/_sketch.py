"""A count-min sketch of how often contents were used lately."""

from __future__ import annotations

from zlib import crc32

MAX_COUNT = 15
"""Four bits."""
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MASK = 2**64 - 1
_HALVED = bytes(count >> 1 for count in range(256))


class FrequencySketch:
    """Four rows of counters of four bits; a content's count is the smallest of its four. After `sample` uses all counts are halved.

    Args:
        capacity: contents that it should tell apart; each row has at least four counters for each. sample: uses.
    """

    __slots__ = ("_num_added", "_rows", "_sample", "_shift")

    def __init__(self, capacity: int, sample: int) -> None:
        num_bits = max(4, (4 * capacity - 1).bit_length())
        self._shift = 64 - num_bits
        self._rows = [bytearray(2**num_bits) for _ in _MULTIPLIERS]
        self._sample = max(1, sample)
        self._num_added = 0

    def add(self, content: bytes) -> None:
        """One more use."""
        for row, place in zip(self._rows, self._places(content), strict=True):
            if row[place] < MAX_COUNT:
                row[place] += 1
        self._num_added += 1
        if self._num_added >= self._sample:
            self._rows = [row.translate(_HALVED) for row in self._rows]
            self._num_added //= 2

    def count(self, content: bytes) -> int:
        """Uses, at most 15, rather too many than too few since the last halving."""
        first, second, third, fourth = self._places(content)
        rows = self._rows
        return min(rows[0][first], rows[1][second], rows[2][third], rows[3][fourth])

    def _places(self, content: bytes) -> tuple[int, int, int, int]:
        """Its counter in each row: upper bits of a product, by another odd constant for each."""
        mixed, shift = crc32(content), self._shift
        a, b, c, d = _MULTIPLIERS
        return (mixed * a & _MASK) >> shift, (mixed * b & _MASK) >> shift, (mixed * c & _MASK) >> shift, (mixed * d & _MASK) >> shift
