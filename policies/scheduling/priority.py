"""By priority number."""

from __future__ import annotations

from kvlab.policies.base import SchedulingPolicy
from kvlab.types import GroupView, Now


class Priority(SchedulingPolicy):
    """The lowest priority number goes first; equals in order of arrival.

    Source: vLLM's `--scheduling-policy priority`, https://docs.vllm.ai/en/latest/configuration/engine_args.html
    Parameters: none (each request carries its number).
    Deviations: orders the waiting queue only. vLLM v0 also preempted a running request of lower rank to let a waiting one in;
        pair this with preemption `priority` so that victims are chosen by the same number when blocks run out.
    """

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """(priority, arrival time in s)."""
        return (group.priority, group.arrival_s)
