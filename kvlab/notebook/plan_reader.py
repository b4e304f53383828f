"""What the recorded plans of a run add to its block events: filled slots of blocks, where copies and transfers came from, prefill chunks.

A plan names sequences by number and gives their tables; the request behind a sequence is the one that took the last block of its table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.trace.store import iter_rows
from kvlab.types import UserError

Ints = npt.NDArray[np.int64]


@dataclass
class PlanView:
    """Read from the table `plans`.

    Attributes:
        fill_steps: (step, number of blocks whose filled slots changed in it). fill_blocks, fill_slots: those of all steps, in order.
        copies: (step, source, destination) within the gpu tier.
        transfers: (step, source tier, source, destination tier, destination).
        chunks: (step, last block of the sequence's table, tokens computed): entries with more than one token, prefill chunks.
        note: why reading stopped early; "" if it didn't.
    """

    fill_steps: list[tuple[int, int]] = field(default_factory=list)
    fill_blocks: list[int] = field(default_factory=list)
    fill_slots: list[int] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    transfers: list[tuple[int, str, int, str, int]] = field(default_factory=list)
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    note: str = ""
    filled: dict[int, int] = field(default_factory=dict)
    """Filled slots of each block after the step read last."""

    def fill_columns(self, allocated: Ints, num_steps: int, num_blocks: int) -> tuple[Ints, npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
        """Filled slots as columns: starts by step [S + 1], block, filled slots. A block begins with none where it is `allocated`, rows of
        (step, block)."""
        empty = np.column_stack((allocated, np.zeros(len(allocated), dtype=np.int64)))
        when = np.array(self.fill_steps, dtype=np.int64).reshape(-1, 2)
        written = np.column_stack((np.repeat(when[:, 0], when[:, 1]), self.fill_blocks, self.fill_slots)).astype(np.int64)
        rows = np.concatenate((empty, written))
        rows = rows[(rows[:, 0] < num_steps) & (rows[:, 1] < num_blocks)]
        rows = rows[np.argsort(rows[:, 0], kind="stable")]  # within a step: empty first, then what was written
        starts = np.searchsorted(rows[:, 0], np.arange(num_steps + 1), side="left").astype(np.int64)
        return starts, rows[:, 1].astype(np.uint32), np.minimum(rows[:, 2], 65535).astype(np.uint16)


def read_plan_view(folder: Path | None, block_size: int) -> PlanView | None:
    """What the plans of a run's folder say; None where none were recorded. A damaged file ends the reading, with a note."""
    if folder is None:
        return None
    view = PlanView()
    tables: dict[int, list[int]] = {}
    empty = True
    try:
        for _, text in iter_rows(folder, "plans"):
            empty = False
            _read(view, tables, json.loads(text), block_size)
    except (UserError, ValueError, IndexError, TypeError) as error:
        view.note = f"plans are read up to a damaged one: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None if empty and not view.note else view


def _read(view: PlanView, tables: dict[int, list[int]], decisions: list[Any], size: int) -> None:
    """One plan, in the order of `Plan.decisions()`."""
    step, scheduled, added, fresh, released, swap_out, swap_in, copies = decisions[:8]
    for seq_id in released:
        tables.pop(seq_id, None)
    for seq_id, block_ids in added:
        tables.setdefault(seq_id, []).extend(block_ids)
    for seq_id, block_ids in fresh:
        tables[seq_id] = list(block_ids)
    moved = {seq_id for seq_id, _ in fresh}
    filled = _moved(view, step, swap_out, swap_in, copies, size)
    for entry in scheduled:
        seq_id, num_new = entry[0], entry[2]
        table, start = tables.get(seq_id, []), entry[1] - entry[4]
        if num_new == 1 and seq_id not in moved:  # nearly all: a decode writes one slot
            i, slots = start // size, start % size + 1
            if i < len(table) and filled.get(table[i], 0) < slots:
                filled[table[i]] = slots
            continue
        end = start + num_new
        for i in range(start // size, min(-(-end // size), len(table))):
            filled[table[i]] = max(filled.get(table[i], 0), min(size, end - i * size))
        if seq_id in moved:  # a region that has grown may have its old blocks behind what is written
            for block_id in table[-(-end // size) :]:
                filled.setdefault(block_id, 0)
        if num_new > 1 and table:
            view.chunks.append((step, table[min(len(table), -(-end // size)) - 1], num_new))
    view.fill_steps.append((step, len(filled)))
    view.fill_blocks += filled
    view.fill_slots += filled.values()
    view.filled |= filled


def _moved(view: PlanView, step: int, swap_out: list[Any], swap_in: list[Any], copies: list[Any], size: int) -> dict[int, int]:
    """Note copies and transfers; filled slots of the blocks copied to and of those that come back."""
    view.copies += ((step, source, destination) for source, destination in copies)
    view.transfers += ((step, *move[:4]) for move in (*swap_out, *swap_in))
    copied = {destination: view.filled.get(source, 0) for source, destination in copies}
    return copied | {destination: min(size, num_tokens) for _, _, tier, destination, num_tokens in swap_in if tier == "gpu"}


def sources(view: PlanView | None) -> Mapping[str, list[list[int]]]:
    """For each tier [step, block, source block] of every copy and transfer into it: small lists for a widget."""
    if view is None:
        return {}
    into: dict[str, list[list[int]]] = {"gpu": [[s, to, source] for s, source, to in view.copies], "cpu": []}
    for step, _, source, tier, destination in view.transfers:
        into.setdefault(tier, []).append([step, destination, source])
    return into
