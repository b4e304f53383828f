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
- At depth 1 every lane is in each of the flights of `air`, where it computes one token and gets a `LATE` for it; `ahead` of these count
  as computed at the moment (see `kvlab.engine.flight`). Columns tell what has been taken in; what is ahead of it is one number. Who
  leaves gets a `Move` in each flight. A lane leaves when its last token takes off, and rests among the running groups until that lands.

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
from kvlab.engine.flight import Flight, Move
from kvlab.engine.sequence import RUNNING, Sequence, SequenceGroup
from kvlab.policies import batching
from kvlab.policies.base import BatchingPolicy
from kvlab.types import LATE
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
        groups, seqs: by lane. ids: the latest tokens that are known. offset: steps taken in since the columns were made.
        num_blocks: blocks held, of all lanes together.
        scheduled: what the plan in the making, or carried out just now, says of the lanes.
        flights: the engine's, in order; none at depth 0. air: those that the lanes are in. ahead: how many of these count as computed.
    """

    def __init__(self, kv: KVCacheManager, is_allowed: bool) -> None:
        self._kv = kv
        self.flights: list[Flight] = []
        self.air: list[Flight] = []
        self._resting: set[SequenceGroup] = set()  # no lanes any more: their last token is in flight
        self._buffer: Ints = np.empty(0, dtype=np.int64)
        self._is_allowed = is_allowed and kv.regions is None and kv.compression.lossless and kv.compression.attention_window is None
        self._clear()

    def _clear(self) -> None:
        self.groups: list[SequenceGroup] = []
        self.seqs: list[Sequence] = []
        self.seq_ids: tuple[int, ...] = ()
        for flight in self.air:
            flight.lanes = flight.places = None
        self.air = []
        self.offset = self.ahead = self._num_ctx = self.num_blocks = 0
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
        self._shown: Ints = np.zeros(0, dtype=np.int64)  # flights that it shows as computed
        self._settled = 0  # where all sequences are up to date: the `ahead` they show; else -1
        self._untold: list[int] = []  # lanes whose tables may hold what the runner does not know
        self.scheduled: Decodes | None = None

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def num_ctx(self) -> int:
        """Tokens computed, of all lanes together."""
        return self._num_ctx + self.ahead * len(self.groups)

    def _blank_rows(self, num_lanes: int) -> Ints:
        """[NUM_ROWS, num_lanes], its content whatever was there. One buffer for all: memory fresh from the system costs a fault a page."""
        if self._buffer.size < NUM_ROWS * num_lanes:
            self._buffer = np.empty(2 * NUM_ROWS * num_lanes, dtype=np.int64)
        return self._buffer[: NUM_ROWS * num_lanes].reshape(NUM_ROWS, num_lanes)

    # ------------------------------------------------------------ coming and going

    def follow(self, running: list[SequenceGroup]) -> int:
        """Take in the groups behind the last lane that only decode by now; the number of lanes."""
        if self._resting:
            self._resting = {group for group in self._resting if group.status is RUNNING and not group.num_uncomputed_tokens}
            running = self.less_resting(running)
        num = len(self.groups)
        if num and running[:num] != self.groups:
            self.dissolve()
            num = 0
        if self._is_allowed and len(running) > num:
            flight = self._flight_of(running[num])
            new = []
            for group in running[num:] if num else running:
                if not self._only_decodes(group, flight):
                    break
                new.append(group)
            if new and num + len(new) >= FEWEST:
                self._join(new, flight)
        return len(self.groups)

    def less_resting(self, running: Seqs[SequenceGroup]) -> list[SequenceGroup]:
        """Running groups but those that wait for their last token."""
        return [group for group in running if group not in self._resting]

    def others(self, running: Seqs[SequenceGroup]) -> Seqs[SequenceGroup]:
        """Running groups that are no lanes."""
        return [group for group in running if group.lanes is None] if self._resting else running[len(self.groups) :]

    def _flight_of(self, group: SequenceGroup) -> Flight | None:
        """The step in flight that whoever joins has to be in: the one that the lanes are in, or, without lanes, `group`."""
        if self.groups:
            return self.air[-1] if self.air else None
        return self.flights[-1] if self.flights and len(group.seqs) == 1 and group.seqs[0].flight >= 0 else None

    def _only_decodes(self, group: SequenceGroup, flight: Flight | None) -> bool:
        if not group.is_plain or group.phase != "decode" or group.status is not RUNNING or group.sampling.min_tokens:
            return False
        seq = group.seqs[0]
        table, num = seq.table, seq.num_computed
        if table is None or len(seq.tokens) - num != 1 or seq.flight != (-1 if flight is None else flight.plan.step):
            return False
        size = self._kv.block_size
        if table.tail_shared or table.num_dropped_blocks or table.capacity != -(-num // size) * size:
            return False
        if flight is not None:
            move = flight.moves.get(seq.seq_id)
            if move is None or not move.is_late or move.num_new != 1:
                return False
            num -= 1
        is_published = not self._kv.prefix_cache.enabled or num // size <= table.num_full
        return is_published and num >= seq.num_highest and num >= seq.num_prompt

    def _join(self, groups: list[SequenceGroup], flight: Flight | None) -> None:
        if flight is not None and not self.groups:
            self.air, self.ahead, self._settled = [flight], 1, 1
            flight.lanes, flight.places = self, np.zeros(0, dtype=np.int64)
        seqs, ahead = [group.seqs[0] for group in groups], self.ahead
        num, num_rows, size, offset = len(self.groups), len(self._times), self._kv.block_size, self.offset
        first = np.array([seq.num_computed for seq in seqs]) - ahead
        left = np.array([group.max_output - len(seq.tokens) + seq.num_prompt for group, seq in zip(groups, seqs, strict=True)]) + ahead
        self._first = np.concatenate((self._first + offset, first))
        self._last = np.concatenate((self._last - offset, left - 1))
        self._phase = -self._first % size
        self.ids = np.concatenate((self.ids, np.array([seq.tokens[-1 - ahead] for seq in seqs])))
        self._given = np.concatenate((self._given, np.full(len(seqs), num_rows)))  # they have their tokens
        self._shown = np.concatenate((self._shown, np.full(len(seqs), ahead)))
        rows = self._rows[:num_rows].copy()
        self._rows = self._blank_rows(len(self._first))
        self._rows[:num_rows, :num] = rows
        self.offset = 0
        self._settled = -1  # they may show another `ahead` than those there
        self._num_ctx += int(first.sum())
        self.num_blocks += sum(group.num_blocks for group in groups)
        self._untold += range(num, num + len(seqs))
        self.groups += groups
        self.seqs += seqs
        for group in groups:
            group.lanes = self
        if flight is not None:
            flight.take_in([seq.seq_id for seq in seqs], num)
        self._renew()

    def _renew(self) -> None:
        """What follows from the lanes there are."""
        self.seq_ids = tuple([seq.seq_id for seq in self.seqs])
        self._short = {}
        self._next_end = int(self._last.min())
        self._end_ids = tuple(sorted({token for group in self.groups for token in group.end_ids}))
        self._late = np.full(len(self.groups), LATE)

    def leave(self, lane: int) -> Sequence:
        """A lane's sequence up to date, and on its own from now on; `drop` must follow."""
        self.settle_one(lane)
        seq = self._let_go(lane)
        self._num_ctx -= seq.num_computed - self.ahead
        self.num_blocks -= len(seq.table.block_ids)  # type: ignore[union-attr]
        return seq

    def _let_go(self, lane: int) -> Sequence:
        self.groups[lane].lanes = None
        seq = self.seqs[lane]
        for flight in self.air:
            flight.moves[seq.seq_id] = Move(seq, 1, is_late=True)
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
        for name in ("_first", "_last", "_phase", "_given", "_shown", "ids"):
            setattr(self, name, getattr(self, name)[stays])
        for flight in self.air:
            flight.places = (np.arange(len(stays)) if flight.places is None else flight.places)[stays]
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
        for lane in range(len(self.groups)):
            self._let_go(lane)
        self._clear()

    # ------------------------------------------------------------------ planning

    def grow(self) -> int:
        """Give each lane the slot for its next token, in order. Returns how many have it: fewer than there are when blocks ran out."""
        phase = (self.offset + self.ahead) % self._kv.block_size
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
        self.scheduled = Decodes(self.seq_ids, self._first, self.offset + self.ahead, self.num_ctx + len(self.groups), rest)
        return self.scheduled, OneEach(self._late if self.ahead else self.ids, rest_ids)

    def take_off(self, flight: Flight) -> list[ScheduledSeq]:
        """Depth 1: what `plan` said has been submitted. Returns what it schedules of sequences that are no lanes, from now on or before."""
        assert self.scheduled is not None
        scheduled, step = self.scheduled, self.offset + self.ahead
        flight.lanes, flight.places = self, None
        left: list[ScheduledSeq] = []
        if step == self._next_end:
            is_last = self._last == step
            ends = np.flatnonzero(is_last).tolist()
            self._resting.update(self.groups[lane] for lane in ends)
            for lane in ends:
                self.leave(lane)
            self.drop(ends)
            left = [scheduled.entry(lane) for lane in (ends if self.groups else range(len(is_last)))]
            flight.places = np.flatnonzero(~is_last)
        if self.groups:
            self.air.append(flight)
            self.ahead += 1
        else:
            flight.lanes = flight.places = None
        return [*left, *scheduled.rest]

    def take_untold(self) -> list[Sequence]:
        """Sequences whose tables have changed since the last plan, in order; some may not have."""
        if not self._untold:
            return []
        untold, self._untold = sorted(set(self._untold)), []
        seqs = self.seqs
        return [seqs[lane] for lane in untold]

    # ------------------------------------------------------------------ committing

    def advance(self, ids: Ints, end_s: float) -> list[tuple[int, bool, bool]]:
        """One token came for each lane, and nothing is ahead at the moment. Returns (lane, has filled a block, may end), of those of which
        either is true, in order."""
        if len(self._times) == NUM_ROWS:
            self.settle()
        self._rows[len(self._times)] = ids
        self._times.append(end_s)
        self._settled = -1
        self.ids = ids
        self._num_ctx += len(ids)
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
        given, num, shown = int(self._given[lane]), len(self._times), int(self._shown[lane])
        if given < num or shown != self.ahead:
            self._give(self.seqs[lane], self._rows[given:num, lane].tolist(), self._times[given:], shown)
            self._given[lane], self._shown[lane], self._settled = num, self.ahead, -1
        self.seqs[lane].flight = self.air[-1].plan.step if self.air else -1

    def settle(self) -> None:
        """Bring all sequences up to date."""
        if self._settled == self.ahead:
            return
        times, columns = self._times, self._rows[: len(self._times)].T.tolist()
        for seq, ids, given, shown in zip(self.seqs, columns, self._given.tolist(), self._shown.tolist(), strict=True):
            self._give(seq, ids[given:] if given else ids, times[given:] if given else times, shown)
        self._given[:] = 0
        self._times = []
        self._shown[:] = self._settled = self.ahead

    def _give(self, seq: Sequence, ids: list[int], times: Seqs[float], num_shown: int) -> None:
        if num_shown:
            del seq.tokens[-num_shown:]
        seq.tokens += ids
        seq.token_times += times
        seq.num_computed = seq.num_highest = seq.num_computed - num_shown + len(ids)
        seq.group.num_computed_total += len(ids)
        if self.ahead:
            seq.tokens += [LATE] * self.ahead
            seq.num_computed += self.ahead
        seq.flight = self.air[-1].plan.step if self.air else -1
