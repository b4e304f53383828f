"""The one with the most to lose gives way."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import PreemptionPolicy
from kvlab.types import GroupView, Now


class MostComputed(PreemptionPolicy):
    """The group with the most computed tokens gives way first: the costliest choice under recompute, a bound for the others; ties go
    to the latest.

    Source: the worst case in the comparison of victims of vLLM's RFC 54644, https://github.com/vllm-project/vllm/issues/54644
    Parameters: mode: how it gives way. protect_oldest: the earliest-admitted running group is never a candidate.
    Deviations: none.
    """

    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        """Most computed tokens, then latest."""
        return max(enumerate(candidates), key=lambda entry: (entry[1].num_computed_tokens, entry[0]))[1]
