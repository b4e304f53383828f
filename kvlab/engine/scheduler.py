"""`Scheduler.schedule()`: a skeleton that asks policies. It owns the queues; whoever runs the plan gives the outcome to `commit`.

    phases (batching policy)   running: grow, or someone gives way (preemption policy)
                               swapped: come back, if admitted (admission policy)
                               waiting: enter in order (scheduling policy), if admitted (admission policy)

Nothing enters in a step that preempted, as long as something runs. Swapped groups come back before a waiting one is admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seqs
from itertools import islice
from typing import Any

from kvlab.cache.manager import KVCacheManager
from kvlab.engine.chunks import Chunks
from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.entry import Entry
from kvlab.engine.giving_way import GivingWay
from kvlab.engine.hearing import hearers
from kvlab.engine.plan_builder import PlanBuilder
from kvlab.engine.prefixes import Prefixes
from kvlab.engine.queue import Queues, WaitingQueue
from kvlab.engine.sequence import FINISHED, RUNNING, SWAPPED, WAITING, Sequence, SequenceGroup
from kvlab.engine.steady import Lanes, always_decodes
from kvlab.policies import base
from kvlab.types import Admitted, Blocked, IllegalDecision, Now, Plan


def _nothing_flies(group: SequenceGroup) -> None:
    """Depth 0: nothing to take back."""


class Scheduler:
    """Queues and the making of plans.

    Args:
        config: limits. policies: who decides. kv: tables and pools. block_bytes: bytes of a block (for preemption modes).
    """

    def __init__(self, config: EngineConfig, policies: PolicySet, kv: KVCacheManager, block_bytes: int) -> None:
        self.config = config
        self.policies = policies
        self.kv = kv
        self.block_bytes = block_bytes
        self.waiting = WaitingQueue(policies.scheduling, Prefixes(kv))
        self.running: list[SequenceGroup] = []
        self.lanes = Lanes(kv, always_decodes(policies.batching))  # the first of `running`, where they only decode
        self.swapped: list[SequenceGroup] = []
        self.queues = Queues(self)
        self.chunks = Chunks(policies.batching, config.max_num_batched_tokens)
        self.giving_way = GivingWay(self)
        self.released: list[int] = []  # sequences the runner must forget, since the last plan
        self.forked: list[Sequence] = []  # sequences made by the last commit: the runner must start them
        self.recall: Callable[[SequenceGroup], None] = _nothing_flies  # takes a group's tokens in flight back; the engine sets it
        self._owed: list[SequenceGroup] = []  # running groups that wait for blocks which the step in flight still touches
        self._num_admitted = 0
        self._legal_phases: Seqs[Seqs[str]] = ()
        self._orders_running = type(policies.batching).running_order is not base.BatchingPolicy.running_order
        self._tell_entered = hearers(policies, "entered")
        self._enterers = {"swapped": self._schedule_swapped, "waiting": self._schedule_waiting, "running": self._schedule_running}

    # ---------------------------------------------------------------- the step

    def schedule(self, now: Now) -> Plan:
        """Decide one step. Only the queues, tables and pools change; nothing is computed."""
        batching = self.policies.batching
        self.kv.set_now(now)
        self._tell_eviction(now)
        budget = batching.token_budget(self.queues, self.config.max_num_batched_tokens)
        if budget.__class__ is not int or budget < 0:
            raise IllegalDecision("batching", batching, f"a token budget of {budget!r}", "an integer from 0 on")
        build = PlanBuilder(now, budget, self.released, self.forked)
        self.released, self.forked = [], []
        if self._owed:
            build.made_room = any(group.status is RUNNING for group in self._owed)  # what came free is for them
            self._owed.clear()
        build.watermark_blocks = headroom = self.policies.admission.headroom_blocks(self.kv.pool)
        if headroom.__class__ is not int or not 0 <= headroom <= self.kv.pool.num_blocks:
            raise IllegalDecision("admission", self.policies.admission, f"a headroom of {headroom!r} blocks",
                                  f"an integer from 0 to the {self.kv.pool.num_blocks} there are")  # fmt: skip
        for alternative in self._phases(now):
            build.phases = alternative
            for phase in alternative:
                self._enterers[phase](build)
            if build.has_work or build.ended:
                break
        if not build.blocked:
            self._say_who_waits(build)
        return build.build(self.kv)

    def _tell_eviction(self, now: Now) -> None:
        """What the waiting queue will hit, for an eviction policy that asks."""
        eviction = self.policies.eviction
        if eviction.queue_depth:
            self.waiting.sort(now)
            eviction.waiting([self.kv.prefix_keys(g.seqs[0]) for g in islice(self.waiting, eviction.queue_depth)], now)

    def _say_who_waits(self, build: PlanBuilder) -> None:
        """Nobody was turned away, yet somebody may be out: all tokens spent, the step preempted, or the queue was not served."""
        group = self.swapped[0] if self.swapped else self.waiting.head(build.now)
        if group is not None:
            by = "preemption" if build.made_room else "batching" if build.budget > 0 else "tokens"
            self._block(group, by, build)

    def _phases(self, now: Now) -> Seqs[Seqs[str]]:
        phases = self.policies.batching.phases(self.queues, now)
        if phases == self._legal_phases:  # mostly those of the step before
            return phases
        try:
            is_legal = all(phase in self._enterers for alternative in phases for phase in alternative)
        except TypeError:  # not even a sequence of sequences
            is_legal = False
        if not is_legal:
            raise IllegalDecision("batching", self.policies.batching, f"phases {phases!r}", "orders of running, waiting, swapped")
        if isinstance(phases, tuple) and all(isinstance(alternative, tuple) for alternative in phases):
            self._legal_phases = phases
        return phases

    # ----------------------------------------------------------------- running

    def _schedule_running(self, build: PlanBuilder) -> None:
        """Every running group gets its next tokens, in order of entry, while the budget lasts."""
        chunk, limit = self.policies.batching.chunk, self.config.max_num_batched_tokens
        scheduled = build.work
        for group in self._schedule_lanes(build):
            budget = build.budget
            if budget <= 0:
                return
            if group.status is not RUNNING or group in scheduled:
                continue  # gave way or ended in this step, or entered in it
            seqs = group.seqs
            if len(seqs) == 1 and group.is_forked and group.beam is None:  # the common case, without detours
                seq, table = seqs[0], seqs[0].table
                missing = len(seq.tokens) - seq.num_computed
                if not missing:
                    continue  # depth 1: it goes on, if at all, after the step in flight
                n = chunk(missing, budget, limit)
                is_legal = n.__class__ is int and 0 < n <= missing and n <= budget
                if is_legal and seq.num_computed + n <= table.capacity and not table.tail_shared:  # type: ignore[union-attr]
                    scheduled[group] = [(seq, n, 1 if n == missing else 0)]
                    build.budget = budget - n
                    continue
            self._grow_and_schedule(group, build)

    def _schedule_lanes(self, build: PlanBuilder) -> Seqs[SequenceGroup]:
        """Those at the head that only decode, all at once; returns who is left."""
        lanes, running = self.lanes, self._running_order(build.now) if self._orders_running else self.running
        if build.lanes is not None:  # a second phase of the same step
            return [group for group in running if group.lanes is None]
        num = lanes.follow(self.running)
        if not num:
            return tuple(running)
        if build.work or build.budget < num or (self._orders_running and lanes.less_resting(running)[:num] != lanes.groups):
            lanes.dissolve()
            return tuple(running)
        num_grown = lanes.grow()
        if num_grown == num:
            build.add_lanes(lanes)
            return tuple(lanes.others(running))
        grown = lanes.groups[:num_grown]
        lanes.dissolve()
        for group in grown:
            build.add(group, [(group.seqs[0], 1, 1)])
        return tuple(running)  # who has got something is passed over

    def _running_order(self, now: Now) -> Seqs[SequenceGroup]:
        """The batching policy's order of the running groups."""
        answer: object = self.policies.batching.running_order(tuple(self.running), now)
        ordered: Any = tuple(answer) if isinstance(answer, Iterable) else ()
        if len(ordered) != len(self.running) or {id(group) for group in ordered} != {id(group) for group in self.running}:
            raise IllegalDecision("batching", self.policies.batching, f"an order of {len(ordered)} groups",
                                  f"each of the {len(self.running)} that run, once")  # fmt: skip
        return ordered

    def _grow_and_schedule(self, group: SequenceGroup, build: PlanBuilder) -> None:
        """Schedule a running group's next tokens; where blocks are short someone gives way, at last the group itself."""
        work = self.chunks.work_of(group, build.budget)
        growth = [(seq, seq.num_computed + n) for seq, n, _ in work]
        while not self.kv.grow(growth):
            if self.kv.can_grow_later(growth):
                self._owed.append(group)
                return
            if self.giving_way.make_room(group, build) is group:
                return
        if work:
            build.add(group, work)

    # ------------------------------------------------------------------- entry

    def _may_enter(self, build: PlanBuilder) -> bool:
        return build.budget > 0 and not (build.made_room and self.running)

    def _swapped_first(self, build: PlanBuilder) -> bool:
        """Whether the next swapped group goes before the head of the waiting queue: always, unless the policy sorts them together."""
        if self.policies.scheduling.preempted_first:
            return True
        self.swapped[:] = self.waiting.in_order(self.swapped, build.now)
        head = self.waiting.head(build.now)
        if head is None or "waiting" not in build.phases:
            return True
        return self.waiting.in_order((self.swapped[0], head), build.now)[0] is self.swapped[0]

    def _num_running_seqs(self) -> int:
        num_lanes = len(self.lanes.groups)
        if num_lanes == len(self.running):
            return num_lanes
        return num_lanes + sum([g.num_sequences for g in self.lanes.others(self.running)])

    def _schedule_swapped(self, build: PlanBuilder) -> None:
        """Swapped groups come back, oldest first, while they are admitted and fit."""
        while self.swapped and self._may_enter(build) and self._swapped_first(build):
            group = self.swapped[0]
            work = self.chunks.work_of(group, build.budget)
            target = max((s.num_computed + n for s, n, _ in work), default=0)
            entry = Entry(group, "swapped_in", [], target, self.running, self.kv)
            growth = [(s, s.num_computed + n) for s, n, _ in work]
            if not work:
                return self._block(group, "tokens", build)
            if self._num_running_seqs() + group.num_sequences > self.config.max_num_seqs:
                if self.giving_way.displace(group, build):
                    continue
                return self._block(group, "max_num_seqs", build)
            reason = self._admission(entry, build.now)
            transfers = None if reason else self.kv.swapper.swap_in(group, growth)
            if transfers is None:
                if self.running and self.giving_way.displace(group, build):
                    continue
                if self.running or build.work:
                    return self._block(group, reason or self.kv.why_not(group, [], growth), build)
                if self.kv.pool.give_up_pins():
                    continue
                if len(self.kv.parking):
                    return self._block(group, "in_flight", build)
                return self._give_up_swap(group, build)
            grown = self.kv.grow(growth)
            assert grown, "counted with the entry"
            self.swapped.pop(0)
            build.swap_in += (*transfers, *self.kv.swapper.transfers_for_copies(group, transfers))
            self._enter(group, "swapped_in", work, build, group.seqs[0].num_computed)

    def _give_up_swap(self, group: SequenceGroup, build: PlanBuilder) -> None:
        """Nothing runs and the group with its next tokens does not fit: it has outgrown the pool."""
        self.swapped.remove(group)
        self.kv.swapper.release_swapped(group)
        group.status = FINISHED
        build.ended.append((group.group_id, group.request_id, "kv_capacity"))

    def _schedule_waiting(self, build: PlanBuilder) -> None:
        """Waiting groups enter in order while they are admitted and fit; the first that stays out stops the rest."""
        while len(self.waiting) and self._may_enter(build):
            group = self.waiting.head(build.now)
            assert group is not None
            if self.swapped and self._swapped_first(build):
                return self._block(group, "swapped", build)
            if self._num_running_seqs() + group.num_sequences > self.config.max_num_seqs:
                if self.giving_way.displace(group, build):
                    continue
                return self._block(group, "max_num_seqs", build)
            seq, kind = group.seqs[0], "new" if group.admission_order < 0 else "resumed"
            # A group that comes back needs a token to compute before it samples: its other sequences branch off there.
            match = self.kv.match_prefix(seq, len(seq.tokens) - (1 if len(group.seqs) == 1 else 2))
            seq.num_computed = num_cached = match.num_tokens
            work = self.chunks.work_of(group, build.budget)
            seq.num_computed = 0
            if not work:
                return self._block(group, "tokens", build)
            target = num_cached + work[0][1]
            reason = self._admission(Entry(group, kind, match.block_ids, target, self.running, self.kv), build.now)
            # Counted before room is made: what was lost may be what goes.
            num_lost = self.kv.num_shareable_lost(seq, match) if kind == "new" and not reason else 0
            if not reason and self.kv.enter(group, match.block_ids, target, match.source, num_cached):
                group.num_shareable_lost += num_lost
                self.waiting.pop_head()
                self._enter(group, kind, work, build, num_cached)
                continue
            if self.running:
                if self.giving_way.displace(group, build):
                    continue
                return self._block(group, reason or self.kv.why_not(group, match.block_ids, [(seq, target)]), build)
            if self.kv.pool.give_up_pins():
                continue
            if len(self.kv.parking):
                return self._block(group, "in_flight", build)
            self.waiting.pop_head()  # the whole pool is its own, and too small
            group.status = FINISHED
            build.ended.append((group.group_id, group.request_id, "kv_capacity"))

    def _admission(self, entry: Entry, now: Now) -> str:
        """The admission policy's word; nobody is kept out while nothing runs."""
        if not self.running:
            return ""
        reason = self.policies.admission.admits(entry, self.kv.pool, now)
        if not isinstance(reason, str):
            raise IllegalDecision("admission", self.policies.admission, f"{reason!r}", "'' to admit, or a word that says why not")
        return reason

    def _block(self, group: SequenceGroup, by: str, build: PlanBuilder) -> None:
        build.blocked.append(Blocked(group.group_id, group.request_id, by))

    def _enter(self, group: SequenceGroup, kind: str, work: list[tuple[Sequence, int, int]], build: PlanBuilder,
               num_cached: int = 0) -> None:  # fmt: skip
        group.status = RUNNING
        group.admitted_step = build.now.step
        if group.admission_order < 0:
            group.admission_order = self._num_admitted
            self._num_admitted += 1
            group.first_scheduled_s = build.now.now_s
        seq = group.seqs[0]
        decoding = group.num_output_tokens > 0 and kind == "swapped_in"
        group.enter_phase("decode" if decoding else "prefill", build.now.now_s)
        self.running.append(group)
        for tell in self._tell_entered:
            tell(group, kind, build.now)
        cause = {"new": "admit", "resumed": "resume", "swapped_in": "swap_in"}[kind]
        for member in group.seqs:
            if member.table is not None:
                build.starts[member.seq_id] = (member, cause)
        build.admitted.append(Admitted(group.group_id, group.request_id, kind, len(seq.tokens), num_cached))
        if kind == "new":
            group.num_cached_tokens = num_cached
        build.add(group, work)

    # ------------------------------------------------------------------ leaving

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out of whichever queue holds it and let go of its blocks (finish, abort)."""
        if group.lanes is not None:
            group.lanes.remove(group)
        if group.status == RUNNING:
            self.running = [g for g in self.running if g is not group]
        elif group.status == SWAPPED:
            self.swapped.remove(group)
            self.kv.swapper.release_swapped(group)
        elif group.status == WAITING:
            self.waiting.remove(group)
        if group.status == RUNNING:
            for seq in group.seqs:
                self.let_go(seq)
            self.kv.release_spares(group)
        group.status = FINISHED

    def let_go(self, seq: Sequence, for_fork: bool = False) -> None:
        """Free a sequence's blocks (or leave them to a fork of its group); the runner hears of it with the next plan, if it knew it."""
        if seq in self.forked:
            self.forked.remove(seq)
        elif seq.table is not None:
            self.released.append(seq.seq_id)
        if for_fork:
            self.kv.release_for_fork(seq)
        else:
            self.kv.release(seq)
