"""No admission control."""

from __future__ import annotations

from kvlab.policies.base import AdmissionPolicy, EntryView
from kvlab.types import Now, PoolView


class Unlimited(AdmissionPolicy):
    """Everyone may enter; only the blocks of the first chunk must be there, which the engine itself sees to.

    Source: vLLM V1 schedules so, https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/v1/core/sched/scheduler.py
    Parameters: none.
    Deviations: none.
    """

    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        """Always."""
        return ""
