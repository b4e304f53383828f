"""Taking in what a step produced: accepted tokens, forks, beams, ends; blocks published once full of accepted tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seqs

import numpy as np

from kvlab.cache.manager import KVCacheManager
from kvlab.engine.beam import BeamMove, BeamState
from kvlab.engine.detokenizer import Detokenizer
from kvlab.engine.flight import Flight
from kvlab.engine.scheduler import Scheduler
from kvlab.engine.sequence import Sequence, SequenceGroup
from kvlab.engine.stopping import StopChecker
from kvlab.model.tokenizer import Tokenizer
from kvlab.types import Candidate, Outcome, Plan, ScheduledSeq
from kvlab.types.columns import Ints, OneEach, entry_of

LaneEvents = dict[int, tuple[int, bool, bool]]
"""seq_id -> (lane, has filled a block, may end)."""


class StepCounts:
    """What a step did, in tokens (see `kvlab.trace.schema`)."""

    __slots__ = ("generation", "output", "prompt_computed", "recomputed")

    def __init__(self) -> None:
        self.generation = self.output = self.prompt_computed = self.recomputed = 0


class Committer:
    """Applies an `Outcome` to sequences and tables.

    Args:
        scheduler, kv: whose state changes. tokenizer: for stop strings (None: requests with stop strings are refused).
        new_seq_id: numbers for forks. on_finish: called with a group whose sequences have all ended.
        sequences: seq_id -> sequence, of all live ones.
    """

    def __init__(self, scheduler: Scheduler, kv: KVCacheManager, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...],
                 new_seq_id: Callable[[], int], on_finish: Callable[[SequenceGroup, float], None],
                 sequences: dict[int, Sequence]) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.kv = kv
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.new_seq_id = new_seq_id
        self.on_finish = on_finish
        self.sequences = sequences

    def commit(self, plan: Plan, outcome: Outcome, end_s: float, flight: Flight | None = None) -> StepCounts:
        """Apply one step; `end_s` is the time at which its tokens exist. `flight` (depth 1): knows the sequences whose tokens are wanted;
        the others have ended or given way meanwhile."""
        counts = StepCounts()
        scheduled_seqs, accepted, events = self._commit_lanes(plan, outcome, end_s, counts, flight)
        if flight is not None:
            scheduled_seqs, accepted = self._drop_unwanted(scheduled_seqs, accepted, flight, events, counts)
        if not scheduled_seqs:
            return counts
        size, sequences, publishes = self.kv.block_size, self.sequences, self.kv.prefix_cache.enabled
        drops = self.kv.compression.attention_window is not None or not self.kv.compression.lossless
        lanes, ended_lanes = self.scheduler.lanes, list[int]()
        beams: dict[SequenceGroup, dict[int, tuple[Candidate, ...]]] = {}
        computed: list[Sequence] = []
        num_generation = num_output = 0  # of the common case; the others count by themselves
        for scheduled, tokens in zip(scheduled_seqs, accepted, strict=True):
            if scheduled.seq_id in events:
                if self._take_in_lane(*events[scheduled.seq_id], end_s):
                    ended_lanes.append(events[scheduled.seq_id][0])
                continue
            seq = sequences[scheduled.seq_id]
            group = seq.group
            first = scheduled.first_position
            end = first + scheduled.num_new_tokens
            seq.num_computed = end
            if first >= seq.num_highest and first >= seq.num_prompt:
                num_generation += end - first
                group.num_computed_total += end - first
                seq.num_highest = end
            else:
                self._count(seq, first, end, counts)
            if publishes and end // size > seq.table.num_full:  # type: ignore[union-attr]
                self.kv.publish(seq)
            if scheduled.num_samples:
                if group.is_plain and group.phase == "decode" and tokens[0] not in group.end_ids:
                    seq.tokens.append(tokens[0])
                    seq.token_times.append(end_s)
                    num_output += 1
                    if len(seq.tokens) - seq.num_prompt >= group.max_output:
                        self.finish(seq, "length", end_s)
                elif group.beam is not None:
                    beams.setdefault(group, {})[seq.seq_id] = outcome.candidates[seq.seq_id]
                else:
                    self._accept(seq, tokens, outcome, end_s, counts)
            if drops or not group.is_plain:
                computed.append(seq)
        if ended_lanes:
            lanes.drop(ended_lanes)
        counts.generation += num_generation
        counts.output += num_output
        self._attach(computed)
        for group, candidates in beams.items():
            self._advance_beams(group, candidates, end_s, counts)
        if drops:
            for seq in computed:
                if seq.table is not None and not seq.finish_reason:
                    self.kv.drop_unread(seq)
        return counts

    def _commit_lanes(self, plan: Plan, outcome: Outcome, end_s: float, counts: StepCounts,
                      flight: Flight | None) -> tuple[Seqs[ScheduledSeq], Seqs[tuple[int, ...]], LaneEvents]:  # fmt: skip
        """One token for each lane. Returns what is left to be done in the plan's order: what is scheduled besides and the tokens that
        came of it; where lanes are not the plan's first, those among them to which something happens, and what."""
        lanes, scheduled, tokens = self.scheduler.lanes, plan.scheduled, outcome.tokens
        is_in = scheduled is lanes.scheduled if flight is None else flight.lanes is not None
        if not is_in or not scheduled:
            return scheduled, tokens, {}
        num, places = len(lanes), None if flight is None else flight.places
        counts.generation += num
        counts.output += num
        events = lanes.advance(_lane_ids(tokens, places, num), end_s)
        if places is None:
            ended = [event[0] for event in events if self._take_in_lane(*event, end_s)]
            if ended:
                lanes.drop(ended)
            if len(scheduled) == num:
                return (), (), {}
            others = range(num, len(scheduled))
            return [entry_of(scheduled, i) for i in others], [entry_of(tokens, i) for i in others], {}
        is_left = np.ones(len(scheduled), dtype=np.bool_)
        is_left[places] = False
        is_left[places[[lane for lane, _, _ in events]]] = True
        left = np.flatnonzero(is_left).tolist()
        by_id = {lanes.seqs[event[0]].seq_id: event for event in events}
        return [entry_of(scheduled, i) for i in left], [entry_of(tokens, i) for i in left], by_id

    def _take_in_lane(self, lane: int, fills: bool, may_end: bool, end_s: float) -> bool:
        """Something happens to a lane; whether it ends (and is to be dropped)."""
        lanes = self.scheduler.lanes
        if fills:
            lanes.publish(lane)
        reason = lanes.why_ended(lane) if may_end else ""
        if reason:
            self.finish(lanes.leave(lane), reason, end_s)
        return bool(reason)

    def _drop_unwanted(self, scheduled_seqs: Seqs[ScheduledSeq], tokens: Seqs[tuple[int, ...]], flight: Flight, events: LaneEvents,
                       counts: StepCounts) -> tuple[Seqs[ScheduledSeq], Seqs[tuple[int, ...]]]:  # fmt: skip
        """What is left without them. A sequence that gave way did compute (and may have to again); of one that has ended nothing is
        recorded."""
        kept = [i for i, scheduled in enumerate(scheduled_seqs) if scheduled.seq_id in flight.moves or scheduled.seq_id in events]
        if len(kept) == len(scheduled_seqs):
            return scheduled_seqs, tokens
        dropped = set(range(len(scheduled_seqs))).difference(kept)
        for scheduled in (scheduled_seqs[i] for i in sorted(dropped)):
            seq = self.sequences.get(scheduled.seq_id)
            if seq is not None:
                self._count(seq, scheduled.first_position, scheduled.first_position + scheduled.num_new_tokens, counts)
        return [scheduled_seqs[i] for i in kept], [tokens[i] for i in kept]

    @staticmethod
    def _count(seq: Sequence, first: int, end: int, counts: StepCounts) -> None:
        num = end - first
        seq.group.num_computed_total += num
        if first < seq.num_highest:
            again = min(end, seq.num_highest) - first
            counts.recomputed += again
            seq.group.num_recomputed += again
        if first < seq.num_prompt:
            counts.prompt_computed += min(end, seq.num_prompt) - first
        counts.generation += max(0, end - max(first, seq.num_prompt))
        if end > seq.num_highest:
            seq.num_highest = end

    # ------------------------------------------------------------ plain samples

    def _accept(self, seq: Sequence, tokens: tuple[int, ...], outcome: Outcome, end_s: float, counts: StepCounts) -> None:
        """Append accepted tokens; on the first step of n samples, fork first: children share the prompt's blocks."""
        group = seq.group
        logprobs = outcome.logprobs.get(seq.seq_id, ()) if outcome.logprobs else ()
        children: list[tuple[Sequence, int]] = []
        if not group.is_forked:
            group.is_forked = True
            children = [(self._fork(seq, stream), token) for stream, token in enumerate(outcome.forks[seq.seq_id], start=1)]
        for i, token in enumerate(tokens):
            if logprobs:
                seq.logprobs.append(logprobs[i])
            counts.output += 1
            if self._append(seq, token, end_s):
                break
        for i, (child, token) in enumerate(children):
            if logprobs:
                child.logprobs.append(logprobs[len(tokens) + i])
            counts.output += 1
            self._append(child, token, end_s)

    def _fork(self, parent: Sequence, stream: int) -> Sequence:
        """A new sequence with `parent`'s computed tokens, before its new token is appended."""
        child = Sequence(self.new_seq_id(), parent.group, stream, parent.tokens[: parent.num_computed])
        self.kv.fork(parent, child, parent.num_computed)
        child.num_highest = parent.num_computed
        parent.group.seqs.append(child)
        self.sequences[child.seq_id] = child
        self.scheduler.forked.append(child)
        return child

    def _append(self, seq: Sequence, token: int, end_s: float) -> bool:
        """Append one token; True when the sequence ends with it."""
        group = seq.group
        seq.tokens.append(token)
        seq.token_times.append(end_s)
        num_output = len(seq.tokens) - seq.num_prompt
        if num_output == 1:
            group.enter_phase("decode", end_s)
            if group.sampling.stop:
                assert self.tokenizer is not None
                sampling = group.sampling
                seq.stop_checker = StopChecker(Detokenizer(self.tokenizer), sampling.stop, sampling.include_stop_str, sampling.min_tokens)
        elif group.phase == "prefill":
            group.enter_phase("decode", end_s)
        reason = ""
        if token in group.end_ids and num_output > group.sampling.min_tokens:
            reason = "stop"
        has_text = not reason or group.sampling.include_stop_str  # the token that ends a sequence is no part of its text
        if has_text and seq.stop_checker is not None and seq.stop_checker.append(token):
            reason = "stop"
        if not reason and num_output >= group.max_output:
            reason = "length"
        if reason:
            self.finish(seq, reason, end_s)
        return bool(reason)

    def finish(self, seq: Sequence, reason: str, end_s: float) -> None:
        """End one sequence; its group ends with its last one."""
        group = seq.group
        seq.finish_reason = reason
        for other in group.seqs:  # those still to branch off from it do so now: their common part has been computed
            if other.attach_to is seq:
                self._branch(other)
        if seq.stop_checker is not None:
            seq.stop_checker.finish()
        self.scheduler.let_go(seq)
        group.seqs.remove(seq)
        group.ended_seqs.append(seq)
        del self.sequences[seq.seq_id]
        if not group.seqs:
            self.on_finish(group, end_s)

    # ------------------------------------------------- coming back after recompute

    def _attach(self, computed: list[Sequence]) -> None:
        """Sequences of a group that came back branch off once their common prefix is computed."""
        for seq in computed:
            for other in seq.group.seqs:
                if other.attach_to is seq and seq.num_computed >= other.attach_at:
                    self._branch(other)

    def _branch(self, seq: Sequence) -> None:
        parent = seq.attach_to
        assert parent is not None
        seq.attach_to = None
        keys = seq.keys
        self.kv.fork(parent, seq, seq.attach_at)
        seq.keys = keys if len(keys) > len(seq.keys) else seq.keys
        self.scheduler.forked.append(seq)

    # -------------------------------------------------------------------- beams

    def _advance_beams(self, group: SequenceGroup, candidates: dict[int, tuple[Candidate, ...]], end_s: float,
                       counts: StepCounts) -> None:  # fmt: skip
        """Drops first (their regions or blocks come free), then forks from parents' history, then everyone's token."""
        beam = group.beam
        assert beam is not None
        group.is_forked = True
        step = beam.advance(candidates, self.new_seq_id)
        counts.output += len(step.ended) + len(step.continued) + len(step.forks)
        if step.is_done:
            self.end_beams(group, end_s)
            return
        for seq_id in step.dropped:
            seq = self.sequences.pop(seq_id)
            self.scheduler.let_go(seq, for_fork=True)
            group.seqs.remove(seq)
        for move in step.forks:
            self._fork_beam(group, move)
        group.enter_phase("decode", end_s)
        for move in (*step.continued, *step.forks):
            seq = self.sequences[move.seq_id]
            seq.tokens.append(move.token_id)
            seq.token_times.append(end_s)

    def _fork_beam(self, group: SequenceGroup, move: BeamMove) -> None:
        parent = self.sequences[move.parent]
        child = Sequence(move.seq_id, group, 0, parent.tokens[: parent.num_computed])
        self.kv.fork(parent, child, parent.num_computed)
        child.num_highest = parent.num_computed
        child.token_times = list(parent.token_times)
        group.seqs.append(child)
        self.sequences[child.seq_id] = child
        self.scheduler.forked.append(child)

    def end_beams(self, group: SequenceGroup, end_s: float) -> None:
        """The search is over: its best hypotheses become the group's ended sequences."""
        beam = group.beam
        assert isinstance(beam, BeamState)
        times = group.seqs[0].token_times if group.seqs else []
        for seq in list(group.seqs):
            self.scheduler.let_go(seq)
            self.sequences.pop(seq.seq_id, None)
        group.seqs.clear()
        for rank, hypothesis in enumerate(beam.best()):
            seq = Sequence(self.new_seq_id(), group, rank, [*group.request.prompt_token_ids, *hypothesis.token_ids])
            seq.finish_reason, seq.score = hypothesis.reason, hypothesis.score
            seq.token_times = [*times, end_s][: len(hypothesis.token_ids)]
            group.ended_seqs.append(seq)
        self.on_finish(group, end_s)


def _lane_ids(tokens: Seqs[tuple[int, ...]], places: Ints | None, num_lanes: int) -> Ints:
    """The token of each lane."""
    if isinstance(tokens, OneEach):
        if places is None and len(tokens.ids) == num_lanes:
            return tokens.ids
        if places is not None and places.max() < len(tokens.ids):
            return tokens.ids[places]
    return np.array([tokens[place][0] for place in (range(num_lanes) if places is None else places.tolist())])
