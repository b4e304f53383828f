"""Shortest job first, with the true output length."""

from __future__ import annotations

from kvlab.policies.base import SchedulingPolicy, true_output_len
from kvlab.types import GroupView, Now


class SjfOracle(SchedulingPolicy):
    """The request with the shortest true output goes first: what the best predictor of lengths could reach without preemption.

    Source: the classic (shortest job first), by output length as in Fu et al., "Efficient LLM Scheduling by Learning to Rank"
        (NeurIPS 2024), https://arxiv.org/abs/2408.15792, whose oracle it is.
    Parameters: none.
    Deviations: the prompt is no part of a job's length, as there. Works only where the workload knows the lengths.
    """

    reads_oracle = True

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """True output length (tokens), then arrival (s)."""
        return (true_output_len(self, group), group.arrival_s)
