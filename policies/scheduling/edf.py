"""Earliest deadline first."""

from __future__ import annotations

from collections.abc import Mapping

from kvlab.policies.base import SchedulingPolicy, is_number, require
from kvlab.types import GroupView, Now


class Edf(SchedulingPolicy):
    """The request whose next token is due first goes first, by goals for the time to the first token and per token after it.

    Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment" (JACM 1973); goals as in
        DistServe (Zhong et al., OSDI 2024), https://arxiv.org/abs/2401.09670
    Parameters: ttft_ms, tpot_ms: the goals (ms). ttft_ms_per_prompt_token: added to the first for each prompt token.
        by_priority: {priority number: {ttft_ms: ..., tpot_ms: ...}} for classes of requests with goals of their own.
    Deviations: it orders the queue only (preempted requests among the new ones) and sends nobody away. With the same goals for all
        and nothing for a prompt token, requests that have not begun are due in order of arrival.
    """

    preempted_first = False

    def __init__(
        self,
        ttft_ms: float = 1000.0,
        tpot_ms: float = 100.0,
        ttft_ms_per_prompt_token: float = 0.0,
        by_priority: Mapping[int | str, Mapping[str, float]] | None = None,
    ) -> None:
        for name, value in (("ttft_ms", ttft_ms), ("tpot_ms", tpot_ms), ("ttft_ms_per_prompt_token", ttft_ms_per_prompt_token)):
            require(_is_goal(value), self, name, value, "milliseconds, at least 0")
        require(_are_goals(by_priority), self, "by_priority", by_priority,
                "null or {priority number: {ttft_ms: ..., tpot_ms: ...}}, one goal or both, at least 0")  # fmt: skip
        self.ttft_ms = ttft_ms
        self.tpot_ms = tpot_ms
        self.ttft_ms_per_prompt_token = ttft_ms_per_prompt_token
        self.by_priority = by_priority
        self._goals = {int(priority): goals for priority, goals in (by_priority or {}).items()}

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """When the next token is due (s), then arrival (s)."""
        own = self._goals.get(group.priority, {})
        due_ms = own.get("ttft_ms", self.ttft_ms) + self.ttft_ms_per_prompt_token * group.num_prompt_tokens
        due_ms += own.get("tpot_ms", self.tpot_ms) * group.num_output_tokens
        return (group.arrival_s + due_ms / 1000, group.arrival_s)


def _is_goal(value: object) -> bool:
    return is_number(value) and value >= 0


def _are_goals(classes: object) -> bool:
    if classes is None:
        return True
    if not isinstance(classes, Mapping):
        return False
    return all(_is_whole(priority) and isinstance(goals, Mapping) and set(goals) <= {"ttft_ms", "tpot_ms"}
               and all(_is_goal(value) for value in goals.values()) for priority, goals in classes.items())  # fmt: skip


def _is_whole(priority: object) -> bool:
    """Keys of a configuration come as text."""
    try:
        return int(str(priority)) == priority or str(int(str(priority))) == priority
    except ValueError:
        return False
