"""Who leaves running before it has ended: for blocks that another one needs, for a request that is to go first, or for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.cache.shareable import common_prefix_len
from kvlab.engine.hearing import hearers
from kvlab.engine.plan_builder import PlanBuilder
from kvlab.engine.sequence import FINISHED, SWAPPED, WAITING, SequenceGroup
from kvlab.policies.base import SchedulingPolicy, VictimView
from kvlab.types import IllegalDecision, Preempted

if TYPE_CHECKING:
    from kvlab.engine.scheduler import Scheduler


class GivingWay:
    """Asks the preemption policy for victims and modes, and moves them between the scheduler's queues."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._policies = policies = scheduler.policies
        self._may_displace = type(policies.scheduling).displaces is not SchedulingPolicy.displaces
        self._tell_preempted = hearers(policies, "preempted")

    def make_room(self, group: SequenceGroup, build: PlanBuilder) -> SequenceGroup | None:
        """Someone gives way to `group`; returns who left running (`group` itself, when it was chosen or nobody else is there). None: the
        eviction policy gave up its pins instead."""
        if len(self._scheduler.running) == 1:
            if self._kv.pool.give_up_pins():
                return None
            if not any(seq.flight >= 0 for seq in group.seqs):  # else it may get a token yet, or end by itself
                self._end_for_capacity(group, build)
            return group
        policy = self._policies.preemption
        candidates = list(self._scheduler.running)
        if policy.protect_oldest:
            candidates.remove(min(candidates, key=lambda g: g.admission_order))
        victim = policy.victim(tuple(candidates), build.now)
        if not any(victim is candidate for candidate in candidates):
            name = getattr(victim, "request_id", victim)
            protected = " (the oldest is protected)" if policy.protect_oldest else ""
            raise IllegalDecision("preemption", policy, f"victim {name!r}", f"one of the {len(candidates)} candidates{protected}")
        self.preempt(victim, build)  # type: ignore[arg-type]
        return victim  # type: ignore[return-value]

    def displace(self, head: SequenceGroup, build: PlanBuilder) -> bool:
        """The scheduling policy may send a running group away for a waiting or swapped one that found no room. True: it did."""
        if not self._may_displace:
            return False
        policy = self._policies.scheduling
        candidates = tuple(g for g in self._scheduler.running if g.admitted_step != build.now.step)
        victim = policy.displaces(head, candidates, build.now) if candidates else None
        if victim is None:
            return False
        if not any(victim is candidate for candidate in candidates):
            raise IllegalDecision("scheduling", policy, f"displace {getattr(victim, 'request_id', victim)!r}",
                                  f"one of the {len(candidates)} running groups that did not enter in this step, or None")  # fmt: skip
        self.preempt(victim, build, "scheduling")  # type: ignore[arg-type]
        return True

    def preempt(self, victim: SequenceGroup, build: PlanBuilder, cause: str = "blocks") -> None:
        """`victim` leaves running, to be computed again or with its blocks in swap space, as the policy's mode says and space allows."""
        policy, scheduler, kv = self._policies.preemption, self._scheduler, self._kv
        build.made_room |= cause == "blocks"
        view = VictimView(victim, kv.swapper.num_distinct_tokens(victim), kv.swapper.num_swap_blocks(victim),
                               kv.cpu_pool.num_available, scheduler.block_bytes)  # fmt: skip
        wanted = policy.mode.mode(view, build.now)
        build.take_apart(victim)
        scheduler.recall(victim)
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
        scheduler.running.remove(victim)
        victim.num_preemptions += 1
        if transfers is not None:
            build.swap_out += transfers
            victim.status = SWAPPED
            victim.num_swaps += 1
            scheduler.swapped.append(victim)
            scheduler.swapped.sort(key=lambda g: g.admission_order)
        else:
            for seq in victim.seqs:
                kv.release(seq, preempted=True)
            kv.release_spares(victim)
            self._plan_reattachment(victim)
            victim.status = WAITING
            scheduler.waiting.add_preempted(victim, build.now)
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
            self._kv.release(seq)
        self._kv.release_spares(group)
        self._scheduler.running.remove(group)
        group.status = FINISHED
