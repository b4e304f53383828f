"""The engine: requests in, one step at a time, tokens out.

    plan = scheduler.schedule(now)          every decision is a policy's
    outcome = runner.submit(plan).result()  torch, simulated or recorded: the same plan
    committer.commit(plan, outcome, end)    tokens accepted, blocks published, sequences ended
    listeners hear plan, outcome and counts

At depth 1 a plan is submitted before the outcome of the one before is asked for: see `kvlab.engine.flight`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seqs
from typing import NamedTuple

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.pool import CachedBlock
from kvlab.engine.beam import BeamState
from kvlab.engine.clock import Clock, WallClock
from kvlab.engine.commit import Committer
from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.flight import Flight
from kvlab.engine.hearing import hearers
from kvlab.engine.ownership import Owned
from kvlab.engine.randomness import request_seed
from kvlab.engine.records import StatsMaker, make_record, refused_record
from kvlab.engine.request_checks import check_request
from kvlab.engine.runners.base import Runner, RunnerConfig
from kvlab.engine.scheduler import Scheduler
from kvlab.engine.sequence import FINISHED, RUNNING, Sequence, SequenceGroup
from kvlab.engine.stopping import ids_of_the_model
from kvlab.engine.turn import DECIDING, TELLING, Turn
from kvlab.model.config import token_id_tuple
from kvlab.model.tokenizer import Tokenizer
from kvlab.types import (
    BlockEvent,
    IllegalDecision,
    Listener,
    Now,
    Outcome,
    Plan,
    Request,
    RequestRecord,
    StepStats,
    UserError,
)


class StepResult(NamedTuple):
    """One step: what was decided, what came of it, its counts, and the requests that ended with it."""

    plan: Plan
    outcome: Outcome
    stats: StepStats
    finished: tuple[RequestRecord, ...]


class Engine:
    """Serves requests under a set of policies.

    Threads: what is asked of it waits for its `turn`, and a step's `finished` are told to whoever stepped. A listener or a policy
    is called within a step: it may add and abort requests once the step is complete (`on_step`, `on_request`), and nothing before.

    Args:
        config: limits. policies: one a seam; the engine takes them over (a policy object serves one engine at a time).
        runner: carries out plans. clock: WallClock by default.
        tokenizer: for stop strings and texts; None: ids only. eos_token_ids: ids that end a sequence; those that the model can't say
            (outside `vocab_size`, where that is given) are left out.
        listeners: hear steps, requests and block events. model_dtype: what the model computes in (for the storage of K and V).
        block_bytes: bytes of one block over all layers (for preemption modes that weigh a transfer; 0 where there is no cache).

    Raises:
        UserError: an impossible combination; a policy or runner that serves another engine which has requests.
    """

    def __init__(self, config: EngineConfig, policies: PolicySet, runner: Runner, clock: Clock | None = None,
                 tokenizer: Tokenizer | None = None, eos_token_ids: Seqs[int] = (), listeners: Seqs[Listener] = (),
                 model_dtype: str = "float32", block_bytes: int = 0, vocab_size: int | None = None) -> None:  # fmt: skip
        policies.check(config)
        self.turn = Turn()
        self.groups: dict[str, SequenceGroup] = {}
        self._flights: list[Flight] = []  # submitted and not committed, in order
        self.owned = Owned(self, policies, runner)
        policies.reset()
        self.config = config
        self.policies = policies
        self.runner = runner
        self.clock = clock or WallClock()
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        ids = eos_token_ids if isinstance(eos_token_ids, (str, int, float)) else tuple(eos_token_ids)
        self.eos_token_ids = ids_of_the_model(token_id_tuple(ids, "Engine"), vocab_size)
        self.listeners = tuple(listeners)
        self._block_listeners = tuple(x for x in self.listeners if x.wants_block_events)
        self.kv = KVCacheManager(config.num_blocks, config.num_cpu_blocks, config.block_size, policies.eviction,
                                 policies.prefix_cache, policies.layout, policies.compression, config.max_model_len,
                                 config.track_shareable, self._on_block if self._block_listeners else None,
                                 config.depth)  # fmt: skip
        self.scheduler = Scheduler(config, policies, self.kv, block_bytes)
        self.scheduler.recall = self._recall
        self._tell_arrived = hearers(policies, "arrived")
        self._tell_group_ended = hearers(policies, "ended")
        self._tell_computed = hearers(policies, "computed")
        self._ended_groups: list[tuple[SequenceGroup, float]] = []  # policies hear of them once they have heard what was computed
        self._sequences: dict[int, Sequence] = {}
        self._num_groups = 0
        self._next_seq_id = 0
        self.committer = Committer(self.scheduler, self.kv, tokenizer, self.eos_token_ids, self._new_seq_id, self._finish_group,
                                   self._sequences)  # fmt: skip
        self._stats = StatsMaker(self.scheduler, self.kv)
        self._step = 0  # that block events belong to
        self._num_launched = 0
        self.scheduler.lanes.flights = self._flights
        self._finished: list[RequestRecord] = []
        self._untold: list[RequestRecord] = []  # ended within this step; listeners hear of them once the commit is complete
        runner.initialize(RunnerConfig(config.num_blocks, config.num_cpu_blocks, config.block_size, config.max_num_seqs,
                                       config.max_model_len, policies.compression.attention_window,
                                       policies.kv_dtype.storage(model_dtype), self.eos_token_ids, config.depth,
                                       policies.kv_dtype.scales(), policies.compression.num_sink_tokens))  # fmt: skip

    @property
    def sequences(self) -> dict[int, Sequence]:
        """Live sequences by number, up to date. (Ask anew after another step.)"""
        self.scheduler.lanes.settle()
        return self._sequences

    # ---------------------------------------------------------------- requests

    def _new_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id - 1

    def check_request(self, request: Request) -> None:
        """Raise a UserError for a request that can never be served; nothing is changed.

        Raises:
            RequestTooLong: its prompt can't fit; the message holds the blocks needed, those there are and the longest that fits.
            UserError: empty prompt, ids (of the prompt, to stop at) outside the vocabulary, nothing but end ids to choose from below
                min_tokens, more sequences than a step can hold, stop strings without tokenizer.
        """
        check_request(request, self.config, self.policies, self.vocab_size, self.tokenizer, self.eos_token_ids)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            UserError: it can never be served (see `check_request`), its id is in use, or a policy lacks the truth about it
                (MissingOracle); another engine has been given its policies since. Nothing is changed.
        """
        with self.turn.take("Engine.add_request"):
            self.owned.check()
            self._add(request)

    def _add(self, request: Request) -> None:
        self.check_request(request)
        if request.request_id in self.groups:
            raise UserError(f"Request id {request.request_id!r} is in use. Give every request of a run its own id.")
        group_id = self._num_groups
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else request_seed(self.config.seed, request.request_id)
        max_output = min(sampling.max_tokens, self.config.max_model_len - len(request.prompt_token_ids))
        group = SequenceGroup(group_id, request, seed, self.eos_token_ids, max_output)
        seq = Sequence(self._new_seq_id(), group, 0, list(request.prompt_token_ids))
        group.seqs.append(seq)
        if sampling.beam_width:
            group.beam = BeamState.of(seq.seq_id, sampling, self.eos_token_ids, max_output)
        group.pool_blocks = self.kv.pool.blocks
        now = Now(self._num_launched, request.arrival_s)
        for tell in self._tell_arrived:
            tell(group, self.scheduler.queues, now)
        self.scheduler.waiting.add(group, now)
        self._num_groups += 1
        self._sequences[seq.seq_id] = seq
        self.groups[request.request_id] = group

    def refuse(self, request: Request, error: UserError, now_s: float) -> RequestRecord:
        """Record a request that `add_request` would not take (for drivers that go on without it)."""
        record = refused_record(request, str(error), now_s)
        for listener in self.listeners:
            listener.on_request(record)
        return record

    def abort(self, request_id: str, now_s: float | None = None) -> RequestRecord | None:
        """End a request wherever it is; None when there is no such request (any more). Its blocks are free at once."""
        with self.turn.take("Engine.abort"):
            return self._abort(request_id, now_s)

    def _abort(self, request_id: str, now_s: float | None) -> RequestRecord | None:
        group = self.groups.get(request_id)
        if group is None:
            return None
        self._recall(group)
        for seq in list(group.seqs):
            seq.finish_reason = "abort"
        self.scheduler.remove(group)
        self._retire(group)
        record = self._close(group, self.clock.now() if now_s is None else now_s)
        if not self.has_work:
            self.kv.parking.let_go_all()
        self._say_ended(self._num_launched)
        self._tell_ended()
        return record

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. False, and nothing changed, while some request holds a block."""
        with self.turn.take("Engine.reset_prefix_cache"):
            self.owned.check()
            return self.kv.reset_cache()

    def close(self) -> None:
        """It takes no more requests, and its policies may be given to another engine, whatever it has left to do."""
        self.owned.give_back()

    @property
    def has_work(self) -> bool:
        """Requests wait, run or are swapped out, or a step is in flight."""
        return bool(self.groups or self._flights)

    @property
    def has_ended(self) -> bool:
        """Some request ended outside a step (abort) and has not been handed out yet."""
        return bool(self._finished)

    def take_ended(self) -> tuple[RequestRecord, ...]:
        """Requests that ended since the last step, once."""
        ended, self._finished = tuple(self._finished), []
        return ended

    # -------------------------------------------------------------------- step

    def step(self, now_s: float | None = None) -> StepResult:
        """Decide, carry out and take in one step. At depth 1: decide and submit one, and take in the one before; with nothing in flight
        two are decided. A step in which nothing is to be done is taken in at once, after those before it.

        Args:
            now_s: time of the decisions (s); the clock's by default.
        Returns:
            The first step taken in; `finished` of all of them. (Listeners hear each.)
        Raises:
            IllegalDecision: a policy decided what can't be, or kept everything from running though nothing stood in its way.
            UserError: a listener or policy called it, within a step.
        """
        with self.turn.take("Engine.step", DECIDING):
            at_s = self.clock.now() if now_s is None else now_s
            self._launch(at_s)
            if self.config.depth and len(self._flights) == 1 and not self._flights[0].plan.is_empty:
                self._launch(at_s)
            plan, outcome, stats = self._land()
            while self._flights and self._flights[-1].plan.is_empty:
                self._land()
            return StepResult(plan, outcome, stats, self.take_ended())

    def _launch(self, now_s: float) -> None:
        """Make a plan and submit it."""
        start = time.perf_counter()
        self._step = step = self._num_launched
        # With nobody left there is nothing to ask policies; the steps in flight end with a plan of nothing.
        plan = self.scheduler.schedule(Now(step, now_s)) if self.groups else Plan(step, now_s)
        for _, request_id, reason in plan.ended:
            self._end_by_scheduler(self.groups[request_id], reason, now_s)
        if not plan.scheduled and not plan.ended and not plan.preempted and self.groups and not self._flights and not len(self.kv.parking):
            self._refuse_to_stall(plan)
        scheduled = time.perf_counter()
        flight = Flight(plan, self.runner.submit(plan), scheduled - start, scheduled)
        if self.config.depth:
            flight.take_off(self._sequences, self.scheduler.lanes)
        self._flights.append(flight)
        self._num_launched += 1

    def _land(self) -> tuple[Plan, Outcome, StepStats]:
        """Wait for the earliest step in flight and take in what came of it."""
        flight = self._flights.pop(0)
        plan = flight.plan
        outcome = flight.handle.result()
        executed = time.perf_counter()
        end_s = self.clock.advance(outcome.execute_s)
        self._step = plan.step
        if self.config.depth:
            self._take_back(flight)
        before = self._num_outputs(flight) if self._tell_computed else {}
        counts = self.committer.commit(plan, outcome, end_s, flight if self.config.depth else None)
        if before:
            self._say_computed(before, Now(plan.step, end_s))
        for later in self._flights:
            later.take_off_again(self._sequences)
        if not self.has_work:
            self.kv.parking.let_go_all()
        self._say_ended(plan.step)
        committed = time.perf_counter()
        execute_s = outcome.execute_s if outcome.execute_s else executed - flight.submitted_s
        stats = self._stats.make(plan, counts, end_s, flight.schedule_s, execute_s, committed - executed)
        self._step = self._num_launched
        self.turn.within = TELLING
        self._tell_ended()
        for listener in self.listeners:
            listener.on_step(plan, outcome, stats)
        self.turn.within = DECIDING
        return plan, outcome, stats

    def _take_back(self, flight: Flight) -> None:
        """Sequences as they were before `flight` took off, and any step after it."""
        self.kv.parking.landed(flight.plan.step)
        for later in reversed(self._flights):
            later.take_back()
        flight.take_back()
        flight.land()

    def _recall(self, group: SequenceGroup) -> None:
        """What is in flight of a group is not wanted any more."""
        if group.lanes is not None:
            group.lanes.remove(group)
        for flight in reversed(self._flights):
            flight.recall(group)

    def _num_outputs(self, flight: Flight) -> dict[SequenceGroup, list[int]]:
        """For each group of the plan: output tokens so far, tokens computed in this step. Of sequences whose tokens are wanted."""
        counts: dict[SequenceGroup, list[int]] = {}
        for scheduled in flight.plan.scheduled:
            seq = self._sequences.get(scheduled.seq_id)
            if seq is None or (self.config.depth and not flight.wants(seq)):
                continue
            group = seq.group
            if group not in counts:
                counts[group] = [group.num_all_output_tokens, 0]
            counts[group][1] += scheduled.num_new_tokens
        return counts

    def _say_computed(self, before: dict[SequenceGroup, list[int]], now: Now) -> None:
        for group, (num_output, num_computed) in before.items():
            for tell in self._tell_computed:
                tell(group, num_computed, group.num_all_output_tokens - num_output, now)

    def _say_ended(self, step: int) -> None:
        while self._ended_groups:
            group, end_s = self._ended_groups.pop(0)
            for tell in self._tell_group_ended:
                tell(group, Now(step, end_s))

    def _refuse_to_stall(self, plan: Plan) -> None:
        why = ", ".join(f"{b.request_id} stays out by {b.by!r}" for b in plan.blocked) or "no phase served the queues that hold requests"
        raise IllegalDecision("batching", self.policies.batching,
                              f"nothing is scheduled in step {plan.step} though {len(self.groups)} requests are unfinished ({why})",
                              "schedule something while blocks suffice")  # fmt: skip

    # -------------------------------------------------------------------- ends

    def _end_by_scheduler(self, group: SequenceGroup, reason: str, now_s: float) -> None:
        """The scheduler let the group go (its blocks are free already)."""
        group.finish_reason = reason
        if group.beam is not None and not group.beam.is_done:
            group.beam.stop(reason)
            self.committer.end_beams(group, now_s)
            return
        for seq in group.seqs:
            seq.finish_reason = reason
        self._retire(group)
        self._close(group, now_s)

    def _retire(self, group: SequenceGroup) -> None:
        """Live sequences of an ending group become ended ones."""
        for seq in group.seqs:
            self._sequences.pop(seq.seq_id, None)
            if seq.stop_checker is not None:
                seq.stop_checker.finish()
        group.ended_seqs += group.seqs
        group.seqs = []

    def _finish_group(self, group: SequenceGroup, end_s: float) -> None:
        if group.status == RUNNING:
            self.scheduler.remove(group)
        group.status = FINISHED
        self._close(group, end_s)

    def _close(self, group: SequenceGroup, end_s: float) -> RequestRecord:
        group.check_facts()
        del self.groups[group.request_id]
        if self._tell_group_ended:
            self._ended_groups.append((group, end_s))
        record = make_record(group, end_s, self.tokenizer)
        self._finished.append(record)
        self._untold.append(record)
        return record

    def _tell_ended(self) -> None:
        """Told after the commit, so that a listener's error leaves an engine whose step is complete."""
        while self._untold:
            record = self._untold.pop(0)
            for listener in self.listeners:
                listener.on_request(record)

    # ------------------------------------------------------------------ events

    def _on_block(self, kind: str, tier: str, block: CachedBlock) -> None:
        cause = "" if kind == "evict" else self.kv.cause
        parent = block.parent.hex() if kind == "publish" and block.parent is not None else ""
        event = BlockEvent(self._step, kind, tier, block.block_id, block.ref_count, block.content.hex(), cause, parent)
        for listener in self._block_listeners:
            listener.on_block(event)
