"""`Scheduler.schedule()`: a skeleton that asks policies. It owns the queues; whoever runs the plan gives the outcome to `commit`.

    phases (batching policy)   running: grow, or someone gives way (preemption policy)
                               swapped: come back, if admitted (admission policy)
                               waiting: enter in order (scheduling policy), if admitted (admission policy)

Nothing enters in a step that preempted, as long as something runs. Swapped groups come back before a waiting one is admitted.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seqs
from itertools import islice
from typing import Any

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.shareable import common_prefix_len
from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.entry import Entry
from kvlab.engine.hearing import hearers
from kvlab.engine.plan_builder import PlanBuilder
from kvlab.engine.prefixes import Prefixes
from kvlab.engine.queue import WaitingQueue
from kvlab.engine.sequence import FINISHED, RUNNING, SWAPPED, WAITING, Sequence, SequenceGroup
from kvlab.engine.steady import Lanes, always_decodes
from kvlab.policies import base
from kvlab.types import Admitted, Blocked, IllegalDecision, Now, Plan, Preempted


def _nothing_flies(group: SequenceGroup) -> None:
    """Depth 0: nothing to take back."""


class Queues:
    """What policies see of the queues (`QueuesView`)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def waiting(self) -> Seqs[SequenceGroup]:
        """Preempted first, then by the scheduling policy."""
        return tuple(self._scheduler.waiting)

    @property
    def running(self) -> Seqs[SequenceGroup]:
        """In order of entry."""
        return self._scheduler.running

    @property
    def swapped(self) -> Seqs[SequenceGroup]:
        """In order of return."""
        return self._scheduler.swapped

    @property
    def num_waiting(self) -> int:
        """Length of `waiting`."""
        return len(self._scheduler.waiting)


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
        self.released: list[int] = []  # sequences the runner must forget, since the last plan
        self.forked: list[Sequence] = []  # sequences made by the last commit: the runner must start them
        self.recall: Callable[[SequenceGroup], None] = _nothing_flies  # takes a group's tokens in flight back; the engine sets it
        self._owed: list[SequenceGroup] = []  # running groups that wait for blocks which the step in flight still touches
        self._num_admitted = 0
        self._legal_phases: Seqs[Seqs[str]] = ()
        self._displaces = type(policies.scheduling).displaces is not base.SchedulingPolicy.displaces
        self._orders_running = type(policies.batching).running_order is not base.BatchingPolicy.running_order
        self._tell_entered = hearers(policies, "entered")
        self._tell_preempted = hearers(policies, "preempted")
        self._enterers = {"swapped": self._schedule_swapped, "waiting": self._schedule_waiting, "running": self._schedule_running}

    # ---------------------------------------------------------------- the step

    def schedule(self, now: Now) -> Plan:
        """Decide one step. Only the queues, tables and pools change; nothing is computed."""
        batching = self.policies.batching
        self.kv.set_now(now)
        self._tell_eviction(now)
        budget = batching.token_budget(self.queues, self.config.max_num_batched_tokens)
        build = PlanBuilder(now, budget, self.released, self.forked)
        self.released, self.forked = [], []
        if self._owed:
            build.made_room = any(group.status is RUNNING for group in self._owed)  # what came free is for them
            self._owed.clear()
        build.watermark_blocks = self.policies.admission.headroom_blocks(self.kv.pool)
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
        if not all(phase in self._enterers for alternative in phases for phase in alternative):
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
        ordered: Any = tuple(self.policies.batching.running_order(tuple(self.running), now) or ())
        if len(ordered) != len(self.running) or {id(group) for group in ordered} != {id(group) for group in self.running}:
            raise IllegalDecision("batching", self.policies.batching, f"an order of {len(ordered)} groups",
                                  f"each of the {len(self.running)} that run, once")  # fmt: skip
        return ordered

    def _grow_and_schedule(self, group: SequenceGroup, build: PlanBuilder) -> None:
        """Schedule a running group's next tokens; where blocks are short someone gives way, at last the group itself."""
        work = self._work_of(group, build.budget)
        growth = [(seq, seq.num_computed + n) for seq, n, _ in work]
        while not self.kv.grow(growth):
            if self.kv.can_grow_later(growth):
                self._owed.append(group)
                return
            if self._make_room(group, build) is group:
                return
        if work:
            build.add(group, work)

    def _work_of(self, group: SequenceGroup, budget: int) -> list[tuple[Sequence, int, int]]:
        """(sequence, tokens, samples) for each sequence of the group that has something to compute within `budget`."""
        chunk, limit = self.policies.batching.chunk, self.config.max_num_batched_tokens
        seqs = group.seqs
        if len(seqs) == 1 and group.beam is None:
            seq = seqs[0]
            missing = len(seq.tokens) - seq.num_computed
            n = chunk(missing, budget, limit) if missing else 0
            if n != missing or not n:
                self._check_chunk(n, missing, budget)
                return [(seq, n, 0)] if n else []
            return [(seq, n, 1 if group.is_forked else group.sampling.n)]
        work = self._share_out(seqs, budget, 0)
        if group.beam is not None:
            # Beams sample together or not at all: unless all reach their end in this step, each stops one token short of it.
            all_end = sum(samples for _, _, samples in work) == len(seqs)
            return work if all_end else self._share_out(seqs, budget, 1)
        if not group.is_forked:
            work = [(s, n, group.sampling.n if samples else 0) for s, n, samples in work]
        return work

    def _share_out(self, seqs: list[Sequence], budget: int, num_left: int) -> list[tuple[Sequence, int, int]]:
        """The budget, first come first served, to sequences that miss more than `num_left` tokens."""
        work = []
        for seq in seqs:
            missing = len(seq.tokens) - seq.num_computed - num_left
            if seq.attach_to is not None or budget <= 0 or missing <= 0:
                continue
            n = self.policies.batching.chunk(missing, budget, self.config.max_num_batched_tokens)
            self._check_chunk(n, missing, budget)
            if n:
                work.append((seq, n, 1 if n == missing and not num_left else 0))
                budget -= n
        return work

    def _check_chunk(self, n: Any, missing: int, budget: int) -> None:
        if not isinstance(n, int) or not 0 <= n <= min(missing, budget):
            raise IllegalDecision("batching", self.policies.batching, f"compute {n!r} of {missing} tokens with a budget of {budget}",
                                  f"0 to {min(missing, budget)}")  # fmt: skip

    # -------------------------------------------------------------- preemption

    def _make_room(self, group: SequenceGroup, build: PlanBuilder) -> SequenceGroup | None:
        """Someone gives way to `group`; returns who left running (`group` itself, when it was chosen or nobody else is there). None: the
        eviction policy gave up its pins instead."""
        if len(self.running) == 1:
            if self.kv.pool.give_up_pins():
                return None
            if not any(seq.flight >= 0 for seq in group.seqs):  # else it may get a token yet, or end by itself
                self._end_for_capacity(group, build)
            return group
        policy = self.policies.preemption
        candidates = list(self.running)
        if policy.protect_oldest:
            candidates.remove(min(candidates, key=lambda g: g.admission_order))
        victim = policy.victim(tuple(candidates), build.now)
        if not any(victim is candidate for candidate in candidates):
            name = getattr(victim, "request_id", victim)
            protected = " (the oldest is protected)" if policy.protect_oldest else ""
            raise IllegalDecision("preemption", policy, f"victim {name!r}", f"one of the {len(candidates)} candidates{protected}")
        self._preempt(victim, build)  # type: ignore[arg-type]
        return victim  # type: ignore[return-value]

    def _displace(self, head: SequenceGroup, build: PlanBuilder) -> bool:
        """The scheduling policy may send a running group away for a waiting or swapped one that found no room. True: it did."""
        if not self._displaces:
            return False
        policy = self.policies.scheduling
        candidates = tuple(g for g in self.running if g.admitted_step != build.now.step)
        victim = policy.displaces(head, candidates, build.now) if candidates else None
        if victim is None:
            return False
        if not any(victim is candidate for candidate in candidates):
            raise IllegalDecision("scheduling", policy, f"displace {getattr(victim, 'request_id', victim)!r}",
                                  f"one of the {len(candidates)} running groups that did not enter in this step, or None")  # fmt: skip
        self._preempt(victim, build, "scheduling")  # type: ignore[arg-type]
        return True

    def _preempt(self, victim: SequenceGroup, build: PlanBuilder, cause: str = "blocks") -> None:
        policy, kv = self.policies.preemption, self.kv
        build.made_room |= cause == "blocks"
        view = base.VictimView(victim, kv.swapper.num_distinct_tokens(victim), kv.swapper.num_swap_blocks(victim),
                               kv.cpu_pool.num_available, self.block_bytes)  # fmt: skip
        wanted = policy.mode.mode(view, build.now)
        build.take_apart(victim)
        self.recall(victim)
        if wanted not in ("recompute", "swap"):
            raise IllegalDecision("preemption mode", policy.mode, f"mode {wanted!r}", "'recompute' or 'swap'")
        build.take_out(victim)
        num_computed, num_blocks = victim.num_computed_tokens, victim.num_blocks
        for seq in victim.seqs:
            build.forget(seq)
        # Swap space that is read in this step must not be written in it: blocks go out before others come back.
        transfers = kv.swapper.swap_out(victim) if wanted == "swap" and not build.swap_in else None
        build.stay_out(victim)
        mode = "recompute" if transfers is None else "swap"
        self.running.remove(victim)
        victim.num_preemptions += 1
        if transfers is not None:
            build.swap_out += transfers
            victim.status = SWAPPED
            victim.num_swaps += 1
            self.swapped.append(victim)
            self.swapped.sort(key=lambda g: g.admission_order)
        else:
            for seq in victim.seqs:
                kv.release(seq, preempted=True)
            kv.release_spares(victim)
            self._plan_reattachment(victim)
            victim.status = WAITING
            self.waiting.add_preempted(victim, build.now)
        for tell in self._tell_preempted:
            tell(victim, mode, build.now)
        victim.enter_phase("swapped" if transfers is not None else "preempted", build.now.now_s)
        build.preempted.append(Preempted(victim.group_id, victim.request_id, mode, wanted, num_computed, num_blocks, cause))

    @staticmethod
    def _plan_reattachment(group: SequenceGroup) -> None:
        """A group that comes back shares what its sequences have in common: each joins the earlier one most like it."""
        for i, seq in enumerate(group.seqs):
            seq.attach_to, seq.attach_at = None, 0
            for other in group.seqs[:i]:
                common = min(common_prefix_len(seq.tokens, other.tokens), len(seq.tokens) - 1)
                if common > seq.attach_at:
                    seq.attach_to, seq.attach_at = other, common

    def _end_for_capacity(self, group: SequenceGroup, build: PlanBuilder) -> None:
        """Alone in the pool and still no room: the group can never grow again."""
        build.take_out(group)
        build.ended.append((group.group_id, group.request_id, "kv_capacity"))
        for seq in group.seqs:
            build.forget(seq)
            self.kv.release(seq)
        self.kv.release_spares(group)
        self.running.remove(group)
        group.status = FINISHED

    # ------------------------------------------------------------------- entry

    def _may_enter(self, build: PlanBuilder) -> bool:
        return build.budget > 0 and not (build.made_room and self.running)

    def _swapped_first(self, build: PlanBuilder) -> bool:
        """Whether the next swapped group goes before the head of the waiting queue: always, unless the policy sorts them together."""
        if self.policies.scheduling.preempted_first:
            return True
        entry = self.waiting.entry
        self.swapped.sort(key=lambda g: entry(g, build.now)[:2])
        head = self.waiting.head(build.now)
        if head is None or "waiting" not in build.phases:
            return True
        return entry(self.swapped[0], build.now)[:2] < entry(head, build.now)[:2]

    def _num_running_seqs(self) -> int:
        num_lanes = len(self.lanes.groups)
        if num_lanes == len(self.running):
            return num_lanes
        return num_lanes + sum([g.num_sequences for g in self.lanes.others(self.running)])

    def _schedule_swapped(self, build: PlanBuilder) -> None:
        """Swapped groups come back, oldest first, while they are admitted and fit."""
        while self.swapped and self._may_enter(build) and self._swapped_first(build):
            group = self.swapped[0]
            work = self._work_of(group, build.budget)
            target = max((s.num_computed + n for s, n, _ in work), default=0)
            entry = Entry(group, "swapped_in", [], target, self.running, self.kv)
            growth = [(s, s.num_computed + n) for s, n, _ in work]
            if not work:
                return self._block(group, "tokens", build)
            if self._num_running_seqs() + group.num_sequences > self.config.max_num_seqs:
                if self._displace(group, build):
                    continue
                return self._block(group, "max_num_seqs", build)
            reason = self._admission(entry, build.now)
            transfers = None if reason else self.kv.swapper.swap_in(group, growth)
            if transfers is None:
                if self.running and self._displace(group, build):
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
                if self._displace(group, build):
                    continue
                return self._block(group, "max_num_seqs", build)
            seq, kind = group.seqs[0], "new" if group.admission_order < 0 else "resumed"
            # A group that comes back needs a token to compute before it samples: its other sequences branch off there.
            match = self.kv.match_prefix(seq, len(seq.tokens) - (1 if len(group.seqs) == 1 else 2))
            seq.num_computed = num_cached = match.num_tokens
            work = self._work_of(group, build.budget)
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
                if self._displace(group, build):
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
