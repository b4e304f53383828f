"""Steps in flight (depth 1): the next plan is made while the last one runs, as if every sequence went on.

    schedule k+1 ..... submit k+1 ..... outcome k ..... commit k
    (k runs)           (behind k)                       (k+1 runs)

When a plan takes off, the tokens it computes count as computed, and a sequence that samples, and surely goes on unless the token ends it,
gets `LATE` in the place of that token. So the scheduler finds what to do next without knowing the token, and policies see positions one
step ahead. A sequence whose next step depends on more than one token (the first of n samples, beams, the last token by length) gets no
`LATE` and waits a step.

When step k lands, what took off is taken back (k+1 too), the outcome is committed exactly as at depth 0, and k+1 takes off again, less the
sequences that ended: their tokens are dropped when k+1 lands. A group that gives way, is aborted or ends for want of blocks while it is in
flight is recalled: its token is dropped and, after a preemption, sampled again, which gives the same one (randomness depends on seed,
stream and position).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvlab.engine.runners.base import Handle
from kvlab.engine.sequence import Sequence, SequenceGroup
from kvlab.types import LATE, Plan
from kvlab.types.columns import Ints

if TYPE_CHECKING:
    from kvlab.engine.steady import Lanes


@dataclass(slots=True)
class Move:
    """One sequence in flight: tokens that count as computed, and whether it has a `LATE`."""

    seq: Sequence
    num_new: int
    is_late: bool = False

    def take_off(self) -> None:
        """Count as computed."""
        self.seq.num_computed += self.num_new
        if self.is_late:
            self.seq.tokens.append(LATE)

    def take_back(self) -> None:
        """Undo `take_off`."""
        self.seq.num_computed -= self.num_new
        if self.is_late:
            self.seq.tokens.pop()


@dataclass(slots=True)
class Flight:
    """A submitted plan and its handle.

    Attributes:
        schedule_s, submitted_s: how long it took to make, and when it was submitted (performance counter).
        moves: by sequence, those of its sequences whose tokens are still wanted, but for the `lanes` (None: none are in it).
        places: where the lanes stand in `plan.scheduled`; None: they are its first.
    """

    plan: Plan
    handle: Handle
    schedule_s: float
    submitted_s: float
    moves: dict[int, Move] = field(default_factory=dict)
    lanes: Lanes | None = None
    places: Ints | None = None

    def take_off(self, sequences: Mapping[int, Sequence], lanes: Lanes) -> None:
        """Every sequence of the plan is one step further."""
        scheduled = self.plan.scheduled
        for entry in lanes.take_off(self) if scheduled is lanes.scheduled else scheduled:
            seq = sequences[entry.seq_id]
            seq.flight = self.plan.step
            move = self.moves[entry.seq_id] = Move(seq, entry.num_new_tokens, bool(entry.num_samples) and _goes_on(seq))
            move.take_off()

    def take_in(self, seq_ids: list[int], num_lanes: int) -> None:
        """Sequences of it become lanes, behind `num_lanes` others."""
        places = {entry.seq_id: place for place, entry in enumerate(self.plan.scheduled)}
        for seq_id in seq_ids:
            del self.moves[seq_id]
        before = np.arange(num_lanes) if self.places is None else self.places
        self.places = np.concatenate((before, np.array([places[seq_id] for seq_id in seq_ids])))

    def wants(self, seq: Sequence) -> bool:
        """Whether a sequence's tokens are still wanted."""
        return seq.seq_id in self.moves or (self.lanes is not None and seq.group.lanes is self.lanes)

    def take_back(self) -> None:
        """Undo that, for all of them."""
        for move in self.moves.values():
            move.take_back()
        if self.lanes is not None:
            self.lanes.ahead -= 1

    def take_off_again(self, sequences: Mapping[int, Sequence]) -> None:
        """After `take_back` and the commit of an earlier step: those that still live."""
        self.moves = {seq_id: move for seq_id, move in self.moves.items() if seq_id in sequences}
        for move in self.moves.values():
            move.take_off()
        if self.lanes is not None:
            self.lanes.ahead += 1

    def land(self) -> None:
        """Its sequences are in flight no longer, unless a later step has them."""
        if self.lanes is not None:
            self.lanes.air.pop(0)
        for move in self.moves.values():
            if move.seq.flight == self.plan.step:
                move.seq.flight = -1

    def recall(self, group: SequenceGroup) -> None:
        """The group's tokens are not wanted any more. What has been computed stays, but the last token is to be computed (again), so that
        the next one is sampled."""
        for seq in group.seqs:
            move = self.moves.pop(seq.seq_id, None)
            if move is None:
                continue
            if move.is_late:
                seq.tokens.pop()
            branches = [other.attach_at for other in group.seqs if other.attach_to is seq]  # made when it gets there, in a commit
            seq.num_computed = min([seq.num_computed, len(seq.tokens) - 1, *(at - 1 for at in branches)])


def _goes_on(seq: Sequence) -> bool:
    """Whether a sequence that samples has a next step whatever the token, unless that ends it."""
    group = seq.group
    return group.is_forked and group.beam is None and len(seq.tokens) + 1 - seq.num_prompt < group.max_output
