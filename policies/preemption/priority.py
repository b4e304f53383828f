"""The least important gives way."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import PreemptionPolicy
from kvlab.types import GroupView, Now


class Priority(PreemptionPolicy):
    """The group with the largest priority number gives way first; among equals the one that entered last.

    Source: vLLM V1 with `--scheduling-policy priority`: max(running, key=(priority, arrival_time)),
        https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/v1/core/sched/scheduler.py
    Parameters: mode: how it gives way. protect_oldest: the earliest-admitted running group is never a candidate.
    Deviations: equals by order of entry into running, not of arrival.
    """

    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        """Largest number, then latest."""
        return max(enumerate(candidates), key=lambda entry: (entry[1].priority, entry[0]))[1]
