"""The recorded block events of a run as columns: which block was in which state after any step, and the same data packed for a browser.

Shape legend: N blocks of a tier, S steps, R block events (records), F changes of a block's number of filled slots.

A record holds the state of its block after it, so the state of the pool after step s is, for each block, the last record before
`starts[s + 1]`. Records of a step that the engine began and never ended (a killed run) belong to the last state shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvlab.notebook.packing import Arrays
from kvlab.notebook.plan_reader import PlanView

KINDS = ("allocate", "publish", "hit", "share", "unshare", "release", "free", "evict", "swap_out", "swap_in", "copy", "drop")
"""Kinds of block events in the order of their codes."""

FREE, USED, SHARED, CACHED, RESERVED, SWAPPED = range(6)
STATES = ("free", "used", "shared", "cached", "kept by the watermark", "swapped out")
"""What a block can be, in the order of the codes above. Used: in one block table; shared: in several; cached: in none, content kept."""

_HEX = re.compile("[0-9a-fA-F]+").fullmatch
_ENDS = (KINDS.index("free"), KINDS.index("evict"))
NOBODY = 0


@dataclass
class TierLog:
    """Block events of one tier.

    Attributes:
        num_blocks: N. starts: int64 [S + 1], records of step s are [starts[s], starts[s + 1]).
        block, kind, ref_count, request, content: [R]; `kind` is an index of KINDS, `request` of the log's names (0: nobody), `content` the
            first 32 bits of the block's key (0: none).
        fill_starts, fill_block, fill: [S + 1], [F], [F]: filled slots of a block after a step, where plans were recorded.
    """

    num_blocks: int
    starts: npt.NDArray[np.int64]
    block: npt.NDArray[np.uint32]
    kind: npt.NDArray[np.uint8]
    ref_count: npt.NDArray[np.uint16]
    request: npt.NDArray[np.uint32]
    content: npt.NDArray[np.uint32]
    fill_starts: npt.NDArray[np.int64]
    fill_block: npt.NDArray[np.uint32]
    fill: npt.NDArray[np.uint16]

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.starts) - 1

    def set_fills(self, starts: npt.NDArray[np.int64], block: npt.NDArray[np.uint32], fill: npt.NDArray[np.uint16]) -> None:
        """Filled slots are known."""
        self.fill_starts, self.fill_block, self.fill = starts, block, fill

    def record_states(self) -> npt.NDArray[np.uint8]:
        """State of the block after each record, [R]."""
        states = np.where(self.ref_count > 1, SHARED, np.where(self.ref_count == 1, USED, CACHED)).astype(np.uint8)
        states[np.isin(self.kind, _ENDS)] = FREE
        return states

    def states(self, steps: Sequence[int]) -> npt.NDArray[np.uint8]:
        """State of every block after each of these steps (ascending), [len(steps), N]."""
        of_record = np.append(self.record_states(), FREE).astype(np.uint8)
        return np.stack([of_record[last] for last in self._last(steps, self.starts, self.block)]) if len(steps) else self._none()

    def ref_counts(self, step: int) -> npt.NDArray[np.uint16]:
        """Block tables that hold each block after a step, [N]."""
        counts = np.append(np.where(np.isin(self.kind, _ENDS), 0, self.ref_count), 0).astype(np.uint16)
        return counts[next(self._last([step], self.starts, self.block))]

    def fills(self, step: int) -> npt.NDArray[np.uint16]:
        """Filled slots of each block after a step, [N]; 0 where plans were not recorded, and for free blocks."""
        fills = np.append(self.fill, 0).astype(np.uint16)[next(self._last([step], self.fill_starts, self.fill_block))]
        return np.where(self.states([step])[0] == FREE, 0, fills).astype(np.uint16)

    def holders(self, block_id: int, step: int) -> list[int]:
        """Requests that hold a block after a step, one entry a table, in the order in which they took it."""
        holding: list[int] = []
        end = self.starts[step + 1]
        for record in np.flatnonzero(self.block[:end] == block_id):
            kind, request = KINDS[self.kind[record]], int(self.request[record])
            if kind in ("allocate", "hit", "share"):
                holding.append(request)
            elif kind in ("unshare", "release", "free", "evict") and holding:
                holding.remove(request) if request in holding else holding.pop()
        return holding

    def _none(self) -> npt.NDArray[np.uint8]:
        return np.zeros((0, self.num_blocks), dtype=np.uint8)

    def _last(self, steps: Sequence[int], starts: npt.NDArray[np.int64], block: npt.NDArray[np.uint32]) -> Iterator[npt.NDArray[np.int64]]:
        """For each step the number of each block's last record, [N]; -1: none yet."""
        last = np.full(self.num_blocks, -1, dtype=np.int64)
        done = 0
        for step in steps:
            end = int(starts[step + 1])
            last[block[done:end]] = np.arange(done, end)  # of equal indices the last one stays
            done = end
            yield last

    def arrays(self, prefix: str) -> Arrays:
        """The columns by name, for packing."""
        small = {"starts": self.starts.astype(np.uint32), "fill_starts": self.fill_starts.astype(np.uint32)}
        names = ("block", "kind", "ref_count", "request", "content", "fill_block", "fill")
        return {f"{prefix}{name}": values for name, values in (small | {n: getattr(self, n) for n in names}).items()}


@dataclass
class BlockLog:
    """All of a run's block events. `requests[i]`: name of request i, `requests[0]` is "". `tiers`: by name, gpu first."""

    tiers: dict[str, TierLog]
    requests: list[str]
    num_steps: int
    notes: list[str] = field(default_factory=list)


def tier_log(events: pd.DataFrame, num_blocks: int, num_steps: int, request: npt.NDArray[np.uint32]) -> TierLog:
    """Columns of one tier from its rows of `run.blocks()`, in order. `request`: a number for each row's request."""
    step = np.minimum(events["step"].to_numpy(), num_steps - 1)
    codes = pd.Categorical(events["kind"], categories=list(KINDS)).codes
    return TierLog(
        num_blocks=num_blocks,
        starts=np.searchsorted(step, np.arange(num_steps + 1), side="left").astype(np.int64),
        block=events["block_id"].to_numpy().astype(np.uint32),
        kind=codes.astype(np.uint8),
        ref_count=np.minimum(events["ref_count"].to_numpy(), 65535).astype(np.uint16),
        request=request,
        content=_first_bits(events["content"]),
        fill_starts=np.zeros(num_steps + 1, dtype=np.int64),
        fill_block=np.zeros(0, dtype=np.uint32),
        fill=np.zeros(0, dtype=np.uint16),
    )


def _first_bits(contents: pd.Series) -> npt.NDArray[np.uint32]:
    """The first 32 bits of keys in hex; 0 for "" and for what is no key. Each different key is read once."""
    codes, names = pd.factorize(contents, use_na_sentinel=False)
    bits = [int(name[:8], 16) if isinstance(name, str) and _HEX(name[:8]) else 0 for name in names]
    return np.array(bits, dtype=np.uint32)[codes] if len(names) else np.zeros(0, dtype=np.uint32)


def block_log(events: pd.DataFrame, sizes: dict[str, int], num_steps: int, plans: PlanView | None = None) -> BlockLog:
    """Columns from `run.blocks()`.

    Args:
        events: block events in order. sizes: blocks of each tier. num_steps: S, at least 1. plans: for filled slots.
    """
    known = events[events["kind"].isin(KINDS) & events["tier"].isin(sizes)]
    notes = [] if len(known) == len(events) else [f"{len(events) - len(known)} block events of an unknown kind are left out"]
    codes, names = pd.factorize(known["request_id"].fillna(""), use_na_sentinel=False)
    order = ["", *(str(n) for n in names if n != "")]
    number = {name: i for i, name in enumerate(order)}
    requests = np.array([number[str(name)] for name in names], dtype=np.uint32)[codes] if len(names) else np.zeros(0, dtype=np.uint32)
    tiers: dict[str, TierLog] = {}
    for tier, num_blocks in sizes.items():
        here = (known["tier"] == tier).to_numpy()
        rows = known[here]
        inside = ((rows["block_id"] >= 0) & (rows["block_id"] < num_blocks)).to_numpy()
        tiers[tier] = tier_log(rows[inside], num_blocks, num_steps, requests[here][inside])
        if plans is not None and tier == "gpu":
            taken = rows.loc[inside & (rows["kind"] == "allocate").to_numpy(), ["step", "block_id"]].to_numpy(dtype=np.int64)
            tiers[tier].set_fills(*plans.fill_columns(taken, num_steps, num_blocks))
    return BlockLog(tiers, order, num_steps, notes)
