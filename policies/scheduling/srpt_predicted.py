"""Shortest remaining processing time, with a predicted output length."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import SchedulingPolicy, is_number, require, true_output_len
from kvlab.policies.scheduling._displacing import Displacements
from kvlab.policies.scheduling._predictor import LengthPredictor, check_predictor
from kvlab.types import GroupView, Now


class SrptPredicted(SchedulingPolicy):
    """The request with the fewest predicted output tokens left goes first, and sends running ones with more left away.

    Source: Shahout et al., "Don't Stop Me Now: Embedding Based Scheduling for LLMs" (TRAIL, 2024), https://arxiv.org/abs/2410.01035
    Parameters: tau: rank correlation of prediction and truth, in [-1, 1]. mean: of the workload's output lengths (tokens). cv: their
        standard deviation / mean. seed: of the noise (all as in sjf_predicted). displaceable_share: a running request is sent away only
        during this first share of its predicted output, in [0, 1] (their C; 0.8 did best there; 1: at any time, 0: never).
    Deviations: the prediction is made once, of the whole output (theirs is refined at every token): a request that outlives it counts
        as about to end. As in srpt_oracle, only output tokens are work, requests are sent away only for want of room and only while
        they decode, and one that did so does it again only after a token of its own.
    """

    reads_oracle = True
    preempted_first = False

    def __init__(self, tau: float = 0.6, mean: float = 48.0, cv: float = 1.0, seed: int = 0, displaceable_share: float = 0.8) -> None:
        check_predictor(self, tau, mean, cv, seed)
        require(is_number(displaceable_share) and 0 <= displaceable_share <= 1, self, "displaceable_share", displaceable_share, "in [0, 1]")
        self.tau = tau
        self.mean = mean
        self.cv = cv
        self.seed = seed
        self.displaceable_share = displaceable_share
        self._predictor = LengthPredictor(tau, mean, cv, seed)
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._displacements = Displacements()
        self._predicted: dict[int, float] = {}  # group id -> output tokens

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """Predicted output tokens left, then arrival (s)."""
        return (self._num_left(group), group.arrival_s)

    def displaces(self, head: GroupView, running: Sequence[GroupView], now: Now) -> GroupView | None:
        """The one with the most left, if that is more than the head has."""
        share = self.displaceable_share
        movable = [group for group in running if group.num_output_tokens < share * self._length(group)]
        return self._displacements.choose(head, movable, self._num_left, now)

    def ended(self, group: GroupView, now: Now) -> None:
        """Nothing to remember any more."""
        self._displacements.forget(group)
        self._predicted.pop(group.group_id, None)

    def _num_left(self, group: GroupView) -> float:
        return max(0.0, self._length(group) - group.num_output_tokens)

    def _length(self, group: GroupView) -> float:
        length = self._predicted.get(group.group_id)
        if length is None:
            length = self._predictor.predict(group.request_id, true_output_len(self, group))
            self._predicted[group.group_id] = length
        return length
