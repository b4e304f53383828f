"""Shortest job first, with a predicted output length."""

from __future__ import annotations

from kvlab.policies.base import SchedulingPolicy, true_output_len
from kvlab.policies.scheduling._predictor import LengthPredictor, check_predictor
from kvlab.types import GroupView, Now


class SjfPredicted(SchedulingPolicy):
    """The request with the shortest predicted output goes first; how well the predictor ranks is a parameter.

    Source: Fu et al., "Efficient LLM Scheduling by Learning to Rank" (NeurIPS 2024), https://arxiv.org/abs/2408.15792: predictions
        matter by their order alone, measured by Kendall's tau (0.5 to 0.7 for their predictors).
    Parameters: tau: rank correlation of prediction and truth, in [-1, 1] (1: the truth, 0: noise, -1: its reverse). mean: of the
        workload's output lengths (tokens), taken to be lognormal. cv: their standard deviation / mean. seed: of the noise.
    Deviations: no model predicts: the truth is blurred by a Gaussian copula, and tau is met where lengths are lognormal with that mean
        and cv. A request that waits long is not promoted (theirs are, after a threshold).
    """

    reads_oracle = True

    def __init__(self, tau: float = 0.6, mean: float = 48.0, cv: float = 1.0, seed: int = 0) -> None:
        check_predictor(self, tau, mean, cv, seed)
        self.tau = tau
        self.mean = mean
        self.cv = cv
        self.seed = seed
        self._predictor = LengthPredictor(tau, mean, cv, seed)

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """Predicted output length (tokens), then arrival (s)."""
        return (self._predictor.predict(group.request_id, true_output_len(self, group)), group.arrival_s)
