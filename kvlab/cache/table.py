"""Block tables, and what the cache must know of sequences and groups (the engine's own satisfy these protocols)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from kvlab.types import Request


class BlockTable:
    """Blocks of one sequence. `num_dropped_blocks`: blocks given up after the first `num_head_blocks`, which have stayed; `num_full`:
    blocks (from the sequence's start) already offered for publication; `capacity`: position of the first token without a slot;
    `tail_shared`: a fork may share the block written next; `num_sent`: blocks the runner knows (-1: it must get the whole row)."""

    __slots__ = ("block_ids", "capacity", "num_dropped_blocks", "num_full", "num_head_blocks", "num_sent", "tail_shared")

    def __init__(self, block_ids: list[int], block_size: int, num_dropped_blocks: int = 0, num_head_blocks: int = 0) -> None:
        self.block_ids = block_ids
        self.num_head_blocks = num_head_blocks
        self.num_dropped_blocks = num_dropped_blocks
        self.capacity = (num_dropped_blocks + len(block_ids)) * block_size
        self.num_full = 0
        self.tail_shared = False
        self.num_sent = -1

    def index(self, block: int) -> int:
        """Where the sequence's `block`-th block stands in `block_ids`; -1: it was given up, or the table does not reach so far."""
        if block >= self.num_head_blocks:
            block -= self.num_dropped_blocks
            if block < self.num_head_blocks:
                return -1
        return block if block < len(self.block_ids) else -1

    def held(self, first: int, end: int) -> list[tuple[int, int]]:
        """Those of the sequence's blocks `first` .. `end` - 1 that were not given up, as ranges (first, end)."""
        gap = self.num_head_blocks, self.num_head_blocks + self.num_dropped_blocks
        if gap[0] == gap[1]:
            return [(first, end)] if first < end else []
        parts = (first, min(end, gap[0])), (max(first, gap[1]), end)
        return [(a, b) for a, b in parts if a < b]


class Seq(Protocol):
    """One stream of tokens. The manager sets `table`, `num_computed`, `keys` and `packed` (its first tokens, packed for comparisons); the
    rest it reads."""

    seq_id: int
    tokens: list[int]
    num_computed: int
    table: BlockTable | None
    keys: list[bytes]
    packed: array[int]
    flight: int
    """The step in flight that computes it (depth 1), whose outcome has not been taken in; -1: none."""

    @property
    def group(self) -> Group:
        """The request it belongs to."""


class Group(Protocol):
    """A request and its sequences."""

    group_id: int
    request_id: str
    request: Request
    num_prompt_tokens: int
    num_cacheable_tokens: int
    max_tokens: int
    oracle_output_len: int | None

    @property
    def seqs(self) -> Sequence[Seq]:
        """Live sequences."""

    @property
    def num_sequences(self) -> int:
        """Live sequences; before the first token, those it will have."""


Work = Sequence[tuple[Seq, int]]
"""(sequence, tokens its table must cover)."""
