"""A plan in the making: what has been scheduled so far in this step, and how to take a victim out of it again."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.table import BlockTable
from kvlab.engine.sequence import Sequence, SequenceGroup
from kvlab.engine.steady import Lanes
from kvlab.types import Admitted, Blocked, BlockTransfer, Now, Plan, Preempted, ScheduledSeq, SeqStart


class PlanBuilder:
    """Collects one step's decisions. `budget`: tokens left. `work`: group -> its (sequence, tokens to compute, samples)."""

    def __init__(self, now: Now, budget: int, released: list[int], starts: list[Sequence]) -> None:
        self.now = now
        self.budget = budget
        self.released = released
        self.starts: dict[int, tuple[Sequence, str]] = {seq.seq_id: (seq, "fork") for seq in starts}
        self.lanes: Lanes | None = None  # scheduled too, before `work`
        self.work: dict[SequenceGroup, list[tuple[Sequence, int, int]]] = {}
        self.swap_out: list[BlockTransfer] = []
        self.swap_in: list[BlockTransfer] = []
        self.admitted: list[Admitted] = []
        self.preempted: list[Preempted] = []
        self.blocked: list[Blocked] = []
        self.ended: list[tuple[int, str, str]] = []
        self.watermark_blocks = 0
        self.made_room = False  # somebody gave way so that a running group could grow: nobody enters in this step
        self.phases: Seqs[str] = ()  # the alternative being served

    def add(self, group: SequenceGroup, work: list[tuple[Sequence, int, int]]) -> None:
        """Schedule a group's sequences."""
        self.work[group] = work
        for _, num_new, _ in work:
            self.budget -= num_new

    @property
    def has_work(self) -> bool:
        """Something is scheduled."""
        return bool(self.work) or self.lanes is not None

    def add_lanes(self, lanes: Lanes) -> None:
        """Schedule all lanes; nothing is scheduled yet."""
        assert not self.work
        self.lanes = lanes
        self.budget -= len(lanes)

    def take_out(self, group: SequenceGroup) -> None:
        """Undo `add` for a group that gives way or ends in this very step; its budget comes back."""
        self.take_apart(group)
        for _, num_new, _ in self.work.pop(group, ()):
            self.budget += num_new

    def take_apart(self, group: SequenceGroup) -> None:
        """A group that is about to be taken out is kept in columns no longer, nor are those that are with it."""
        if group.lanes is not None:
            groups = group.lanes.groups
            group.lanes.dissolve()
            if self.lanes is not None:
                behind = list(self.work.items())
                self.work.clear()  # in place: the scheduler holds this very dictionary while it goes through the queue
                self.work.update({g: [(g.seqs[0], 1, 1)] for g in groups})
                self.work.update(behind)
                self.lanes = None

    def stay_out(self, group: SequenceGroup) -> None:
        """Undo the return of a group that was swapped in in this very step (its blocks are let go, or written anew, by others)."""
        held = {b for seq in group.seqs if seq.table is not None for b in seq.table.block_ids}
        self.swap_in = [t for t in self.swap_in if t.destination not in held]

    def forget(self, seq: Sequence) -> None:
        """The runner must drop its row (unless it has none, or was to be started only now)."""
        if self.starts.pop(seq.seq_id, None) is None and seq.table is not None:
            self.released.append(seq.seq_id)

    def build(self, kv: KVCacheManager) -> Plan:
        """The finished plan, with changes of block tables for the runner."""
        scheduled: list[ScheduledSeq] = []
        token_ids: list[tuple[int, ...]] = []
        tables: dict[int, tuple[int, ...]] = {}
        fresh: dict[int, tuple[int, ...]] = {}
        size = kv.block_size
        for seq in self.lanes.take_untold() if self.lanes is not None else ():
            table = seq.table
            assert table is not None
            num_sent, num = table.num_sent, len(table.block_ids)
            if num_sent == num - 1 >= 0:  # it has grown
                tables[seq.seq_id] = (table.block_ids[-1],)
                table.num_sent = num
            elif num_sent != num:
                self._tell_table(seq.seq_id, table, tables, fresh)
        for work in self.work.values():
            for seq, num_new, num_samples in work:
                table = seq.table
                assert table is not None
                first = seq.num_computed
                scheduled.append(ScheduledSeq(seq.seq_id, first, num_new, num_samples, table.num_dropped_blocks * size))
                tokens = seq.tokens
                token_ids.append((tokens[first],) if num_new == 1 else tuple(tokens[first : first + num_new]))
                if table.num_sent != len(table.block_ids):
                    self._tell_table(seq.seq_id, table, tables, fresh)
        starts = tuple([self._start(seq, cause) for seq, cause in self.starts.values()]) if self.starts else ()
        entries: Seqs[ScheduledSeq] = tuple(scheduled)
        ids: Seqs[tuple[int, ...]] = tuple(token_ids)
        if self.lanes is not None:
            entries, ids = self.lanes.plan(tuple(scheduled), tuple(token_ids))
        return Plan(self.now.step, self.now.now_s, entries, ids, starts, tables, fresh, tuple(self.released),
                    tuple(self.swap_out), tuple(self.swap_in), kv.take_copies(), tuple(self.admitted), tuple(self.preempted),
                    tuple(self.blocked), tuple(self.ended), self.watermark_blocks, kv.compression.attention_window,
                    kv.compression.num_sink_tokens)  # fmt: skip

    @staticmethod
    def _tell_table(seq_id: int, table: BlockTable, tables: dict[int, tuple[int, ...]], fresh: dict[int, tuple[int, ...]]) -> None:
        if table.num_sent < 0:
            fresh[seq_id] = tuple(table.block_ids)
        else:
            tables[seq_id] = tuple(table.block_ids[table.num_sent :])
        table.num_sent = len(table.block_ids)

    @staticmethod
    def _start(seq: Sequence, cause: str) -> SeqStart:
        group = seq.group
        return SeqStart(seq.seq_id, group.group_id, cause, group.sampling, group.seed, seq.stream, seq.num_prompt, tuple(seq.tokens))
