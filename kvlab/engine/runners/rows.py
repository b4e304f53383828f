"""Block tables of a runner's sequences as one array, so that a batch's slots are found without a loop over sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def ragged_positions(first: Ints, counts: Ints) -> Ints:
    """first[i], first[i] + 1, ... (counts[i] of them) for each i, one after the other."""
    ends = np.cumsum(counts)
    return np.repeat(first - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


class BlockRows:
    """A row of block ids per sequence. Beyond a row's length all is 0, so rows of different lengths can be cut out together."""

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}
        self._unused: list[int] = []
        self._table = np.zeros((0, 64), dtype=np.int64)
        self._lengths = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._row_of)

    def add(self, seq_id: int) -> None:
        """An empty row for `seq_id`; one it had is emptied."""
        self.remove(seq_id)
        if not self._unused:
            num_rows = len(self._lengths)
            self._grow(max(64, 2 * num_rows), self._table.shape[1])
            self._unused.extend(range(len(self._lengths) - 1, num_rows - 1, -1))
        self._row_of[seq_id] = self._unused.pop()

    def remove(self, seq_id: int) -> None:
        """Forget `seq_id`, if it is known."""
        row = self._row_of.pop(seq_id, None)
        if row is not None:
            self._clear(row)
            self._unused.append(row)

    def replace(self, seq_id: int, block_ids: Sequence[int]) -> None:
        """The whole row anew."""
        self._clear(self._row_of[seq_id])
        self.append({seq_id: block_ids})

    def append(self, changes: Mapping[int, Sequence[int]]) -> None:
        """Add blocks to the ends of rows."""
        if not changes:
            return
        rows = self.rows(changes)
        counts = np.fromiter(map(len, changes.values()), np.int64, len(changes))
        first = self._lengths[rows]
        longest = int((first + counts).max())
        if longest > self._table.shape[1]:
            self._grow(len(self._lengths), max(longest, 2 * self._table.shape[1]))
        block_ids = np.fromiter(chain.from_iterable(changes.values()), np.int64, int(counts.sum()))
        self._table[np.repeat(rows, counts), ragged_positions(first, counts)] = block_ids
        self._lengths[rows] = first + counts

    def rows(self, seq_ids: Iterable[int]) -> Ints:
        """Row numbers of sequences, for `tables` and `slots`."""
        return np.array([self._row_of[seq_id] for seq_id in seq_ids], dtype=np.int64)

    def tables(self, rows: Ints, num_columns: int) -> Ints:
        """Block tables [S, num_columns] of `rows`, padded with 0."""
        if num_columns > self._table.shape[1]:
            raise RuntimeError(f"A sequence needs {num_columns} blocks; no table here has more than {self._table.shape[1]}.")
        return self._table[rows, :num_columns]

    def slots(self, rows_T: Ints, indices_T: Ints, block_size: int) -> Ints:
        """Pool slots of the `indices_T`-th slots of `rows_T`.

        Raises:
            RuntimeError: a row has too few blocks, so the plan lacks some.
        """
        columns_T = indices_T // block_size
        if (columns_T >= self._lengths[rows_T]).any() or (indices_T < 0).any():
            raise RuntimeError("The plan schedules tokens for which its tables hold no block.")
        slots: Ints = self._table[rows_T, columns_T] * block_size + indices_T % block_size
        return slots

    def _clear(self, row: int) -> None:
        self._table[row, : self._lengths[row]] = 0
        self._lengths[row] = 0

    def _grow(self, num_rows: int, num_columns: int) -> None:
        table = np.zeros((num_rows, num_columns), dtype=np.int64)
        table[: self._table.shape[0], : self._table.shape[1]] = self._table
        self._table = table
        self._lengths = np.concatenate((self._lengths, np.zeros(num_rows - len(self._lengths), dtype=np.int64)))
