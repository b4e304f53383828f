"""The head of the running queue as long as it does nothing but decode, kept in columns: a step costs a few array operations.

A *lane* is a running group of one plain sequence (no beam, no stop string, no logprobs) that has computed all but its latest token.
Lanes are the first groups of the running queue, in its order. In a step all of them do the same: compute one token, get one. So the
state that changes in every step is a row of numbers here, and a sequence is written only when somebody looks at it. What differs between
lanes happens seldom and is found by comparing columns: a lane that needs a block, fills one, or ends.

Invariants:
- `groups` are the first groups of the running queue; each has `group.lanes` set to this object, no other group has.
- A lane's sequence lags behind by the rows that it has not been given. `SequenceGroup.seqs` and `Engine.sequences` settle that before they
  hand out sequences, so nobody who asks there (policies, swap, aborts, tests) sees an old state. Blocks and tables are never behind.
- A lane misses exactly one token, and its table has blocks for its computed ones only: it needs a block when they are a multiple of the
  block size. It has an output, computes nothing again, and has offered every full block for publication.

Decisions are made as ever: the scheduler asks every policy all it asks without lanes, but for one thing. Where a batching policy's `chunk`
is that of a policy of the house it is not asked for each lane: all of those give a decode its one token, whatever the budget. With any
other `chunk` there are no lanes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from itertools import compress
from typing import Any

import numpy as np

from kvlab.cache.manager import KVCacheManager
from kvlab.engine.sequence import RUNNING, Sequence, SequenceGroup
from kvlab.policies import batching
from kvlab.policies.base import BatchingPolicy
from kvlab.types.columns import Decodes, Ints, OneEach, ScheduledSeq

FEWEST = 8
"""With fewer lanes one group after the other is quicker."""

NUM_ROWS = 128
"""Steps after which sequences are written though nobody asked: a bound on memory."""

_CHUNKS: set[Any] = {getattr(batching, name).chunk for name in batching.__all__}


def always_decodes(policy: BatchingPolicy) -> bool:
    """Whether `chunk` is known to give a decode its token, whatever the budget."""
    return getattr(policy.chunk, "__func__", None) in _CHUNKS


class Lanes:
    """The columns.

    Args:
        kv: whose tables grow. is_allowed: False: there never are any lanes.

    Attributes:
        groups, seqs: by lane. ids: the latest tokens, not computed yet. offset: steps since the columns were made.
        num_ctx, num_blocks: tokens computed and blocks held, of all lanes together.
        scheduled: what the plan in the making, or carried out just now, says of the lanes.
    """

    def __init__(self, kv: KVCacheManager, is_allowed: bool) -> None:
        self._kv = kv
        self._buffer: Ints = np.empty(0, dtype=np.int64)
        self._is_allowed = is_allowed and kv.regions is None and kv.compression.lossless and kv.compression.attention_window is None
        self._clear()

    def _clear(self) -> None:
        self.groups: list[SequenceGroup] = []
        self.seqs: list[Sequence] = []
        self.seq_ids: tuple[int, ...] = ()
        self.offset = self.num_ctx = self.num_blocks = 0
        self.ids: Ints = np.zeros(0, dtype=np.int64)
        self._first: Ints = np.zeros(0, dtype=np.int64)  # tokens computed at offset 0
        self._last: Ints = np.zeros(0, dtype=np.int64)  # offset of the step whose token is the last that may come
        self._phase: Ints = np.zeros(0, dtype=np.int64)  # offset, modulo the block size, of steps that need a block
        self._short: dict[int, tuple[list[int], list[Sequence]]] = {}  # by phase: lanes that need a block, and their sequences
        self._next_end = 0
        self._end_ids: tuple[int, ...] = ()
        self._rows = self._blank_rows(0)  # tokens that sequences have not been given
        self._times: list[float] = []  # when they came
        self._given: Ints = np.zeros(0, dtype=np.int64)  # rows that a lane's sequence has been given nevertheless
        self._untold: list[int] = []  # lanes whose tables may hold what the runner does not know
        self.scheduled: Decodes | None = None

    def __len__(self) -> int:
        return len(self.groups)

    def _blank_rows(self, num_lanes: int) -> Ints:
        """[NUM_ROWS, num_lanes], its content whatever was there. One buffer for all: memory fresh from the system costs a fault a page."""
        if self._buffer.size < NUM_ROWS * num_lanes:
            self._buffer = np.empty(2 * NUM_ROWS * num_lanes, dtype=np.int64)
        return self._buffer[: NUM_ROWS * num_lanes].reshape(NUM_ROWS, num_lanes)

    # ------------------------------------------------------------ coming and going

    def follow(self, running: list[SequenceGroup]) -> int:
        """Take in the groups behind the last lane that only decode by now; the number of lanes."""
        num = len(self.groups)
        if num and running[:num] != self.groups:
            self.dissolve()
            num = 0
        if self._is_allowed and len(running) > num:
            new = []
            for group in running[num:] if num else running:
                if not self._only_decodes(group):
                    break
                new.append(group)
            if new and num + len(new) >= FEWEST:
                self._join(new)
        return len(self.groups)

    def _only_decodes(self, group: SequenceGroup) -> bool:
        if not group.is_plain or group.phase != "decode" or group.status is not RUNNING or group.sampling.min_tokens:
            return False
        seq = group.seqs[0]
        table, num = seq.table, seq.num_computed
        if table is None or len(seq.tokens) - num != 1 or num < seq.num_highest or num < seq.num_prompt:
            return False
        size = self._kv.block_size
        is_published = not self._kv.prefix_cache.enabled or num // size <= table.num_full
        return is_published and not table.tail_shared and not table.num_dropped_blocks and table.capacity == -(-num // size) * size

    def _join(self, groups: list[SequenceGroup]) -> None:
        seqs = [group.seqs[0] for group in groups]
        num, num_rows, size, offset = len(self.groups), len(self._times), self._kv.block_size, self.offset
        first = np.array([seq.num_computed for seq in seqs])
        left = np.array([group.max_output - len(seq.tokens) + seq.num_prompt for group, seq in zip(groups, seqs, strict=True)])
        self._first = np.concatenate((self._first + offset, first))
        self._last = np.concatenate((self._last - offset, left - 1))
        self._phase = -self._first % size
        self.ids = np.concatenate((self.ids, np.array([seq.tokens[-1] for seq in seqs])))
        self._given = np.concatenate((self._given, np.full(len(seqs), num_rows)))  # they have their tokens
        rows = self._rows[:num_rows].copy()
        self._rows = self._blank_rows(len(self._first))
        self._rows[:num_rows, :num] = rows
        self.offset = 0
        self.num_ctx += int(first.sum())
        self.num_blocks += sum(group.num_blocks for group in groups)
        self._untold += range(num, num + len(seqs))
        self.groups += groups
        self.seqs += seqs
        for group in groups:
            group.lanes = self
        self._renew()

    def _renew(self) -> None:
        """What follows from the lanes there are."""
        self.seq_ids = tuple([seq.seq_id for seq in self.seqs])
        self._short = {}
        self._next_end = int(self._last.min())
        self._end_ids = tuple(sorted({token for group in self.groups for token in group.end_ids}))

    def leave(self, lane: int) -> Sequence:
        """A lane's sequence up to date, and on its own from now on; `drop` must follow."""
        self.settle_one(lane)
        self.groups[lane].lanes = None
        seq = self.seqs[lane]
        self.num_ctx -= seq.num_computed
        self.num_blocks -= len(seq.table.block_ids)  # type: ignore[union-attr]
        return seq

    def drop(self, lanes: list[int]) -> None:
        """Forget lanes that have left."""
        if len(self.groups) - len(lanes) < FEWEST:
            for i, group in enumerate(self.groups):
                if group.lanes is not None:
                    self.leave(i)
            self._clear()
            return
        stays = np.ones(len(self.groups), dtype=np.bool_)
        stays[lanes] = False
        for name in ("_first", "_last", "_phase", "_given", "ids"):
            setattr(self, name, getattr(self, name)[stays])
        rows = self._rows[: len(self._times), stays]
        self._rows = self._blank_rows(len(self._first))
        self._rows[: len(rows)] = rows
        places = (np.cumsum(stays) - 1).tolist()
        self._untold = [places[lane] for lane in self._untold if stays[lane]]
        self.groups = list(compress(self.groups, stays))
        self.seqs = list(compress(self.seqs, stays))
        self._renew()

    def remove(self, group: SequenceGroup) -> None:
        """Let one go."""
        lane = self.groups.index(group)
        self.leave(lane)
        self.drop([lane])

    def dissolve(self) -> None:
        """Everyone on its own again."""
        self.settle()
        for group in self.groups:
            group.lanes = None
        self._clear()

    # ------------------------------------------------------------------ planning

    def grow(self) -> int:
        """Give each lane the slot for its next token, in order. Returns how many have it: fewer than there are when blocks ran out."""
        phase = self.offset % self._kv.block_size
        if phase not in self._short:
            lanes = np.flatnonzero(self._phase == phase).tolist()
            self._short[phase] = lanes, [self.seqs[lane] for lane in lanes]
        short, seqs = self._short[phase]
        if not short:
            return len(self.groups)
        num_grown = self._kv.add_blocks(seqs)
        self.num_blocks += num_grown
        self._untold += short[:num_grown]
        return len(self.groups) if num_grown == len(short) else short[num_grown]

    def plan(self, rest: tuple[ScheduledSeq, ...], rest_ids: tuple[tuple[int, ...], ...]) -> tuple[Decodes, OneEach]:
        """(`Plan.scheduled`, `Plan.token_ids`) of a step in which `rest` comes behind the lanes."""
        self.scheduled = Decodes(self.seq_ids, self._first, self.offset, self.num_ctx + len(self.groups), rest)
        return self.scheduled, OneEach(self.ids, rest_ids)

    def take_untold(self) -> list[Sequence]:
        """Sequences whose tables have changed since the last plan, in order; some may not have."""
        if not self._untold:
            return []
        untold, self._untold = sorted(set(self._untold)), []
        seqs = self.seqs
        return [seqs[lane] for lane in untold]

    # ------------------------------------------------------------------ committing

    def advance(self, ids: Ints, end_s: float) -> list[tuple[int, bool, bool]]:
        """One token came for each lane. Returns (lane, has filled a block, may end), of those of which either is true, in order."""
        if len(self._times) == NUM_ROWS:
            self.settle()
        self._rows[len(self._times)] = ids
        self._times.append(end_s)
        self.ids = ids
        num = len(ids)
        self.num_ctx += num
        offset, size = self.offset, self._kv.block_size
        self.offset += 1
        ends = self._last == offset if offset == self._next_end else None
        for token in self._end_ids:
            is_end = ids == token
            if is_end.any():
                ends = is_end if ends is None else ends | is_end
        if not self._kv.prefix_cache.enabled:
            return [] if ends is None else [(lane, False, True) for lane in np.flatnonzero(ends).tolist()]
        fills = self._phase == (offset + 1) % size
        which = np.flatnonzero(fills if ends is None else fills | ends)
        may_end = [False] * len(which) if ends is None else ends[which].tolist()
        return list(zip(which.tolist(), fills[which].tolist(), may_end, strict=True))

    def why_ended(self, lane: int) -> str:
        """The finish reason of a lane whose latest token is its last; "" if it goes on."""
        if int(self.ids[lane]) in self.groups[lane].end_ids:
            return "stop"
        return "length" if self._last[lane] < self.offset else ""

    def publish(self, lane: int) -> None:
        """Offer a block that is full now."""
        self.settle_one(lane)
        self._kv.publish(self.seqs[lane])
        self._untold.append(lane)  # a tree may have given it another block

    def settle_one(self, lane: int) -> None:
        """Bring one sequence up to date."""
        given, num = int(self._given[lane]), len(self._times)
        if given < num:
            self._give(self.seqs[lane], self._rows[given:num, lane].tolist(), self._times[given:])
            self._given[lane] = num

    def settle(self) -> None:
        """Bring all sequences up to date."""
        num = len(self._times)
        if not num:
            return
        times, columns = self._times, self._rows[:num].T.tolist()
        if self._given.any():
            for seq, ids, given in zip(self.seqs, columns, self._given.tolist(), strict=True):
                self._give(seq, ids[given:], times[given:])
            self._given[:] = 0
        else:
            for seq, ids in zip(self.seqs, columns, strict=True):
                self._give(seq, ids, times)
        self._times = []

    @staticmethod
    def _give(seq: Sequence, ids: list[int], times: Seqs[float]) -> None:
        seq.tokens += ids
        seq.token_times += times
        seq.num_computed = seq.num_highest = seq.num_computed + len(ids)
        seq.group.num_computed_total += len(ids)
