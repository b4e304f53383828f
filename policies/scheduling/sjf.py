"""Shortest job first, by prompt length."""

from __future__ import annotations

from kvlab.policies.base import SchedulingPolicy
from kvlab.types import GroupView, Now


class Sjf(SchedulingPolicy):
    """The shortest prompt goes first: short requests stop waiting behind long ones, and long ones may wait for ever.

    Source: the classic (shortest job first), with the prompt's length as the job's; with predicted output lengths: Fu et al.,
        "Efficient LLM Scheduling by Learning to Rank" (NeurIPS 2024), https://arxiv.org/abs/2408.15792
    Parameters: none.
    Deviations: a job's output length is unknown and left out; a preempted request keeps the key of its prompt.
    """

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """Prompt length (tokens), then arrival time (s)."""
        return (group.num_prompt_tokens, group.arrival_s)
