"""The one with the least to lose gives way."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import PreemptionPolicy
from kvlab.types import GroupView, Now


class LeastComputed(PreemptionPolicy):
    """The group with the fewest computed tokens gives way first: the least work is thrown away or moved; ties go to the latest.

    Source: SGLang's retraction sorts running requests by the tokens they have decoded,
        https://github.com/sgl-project/sglang/blob/v0.5.3/python/sglang/srt/managers/schedule_batch.py (`retract_decode`)
    Parameters: mode: how it gives way. protect_oldest: the earliest-admitted running group is never a candidate.
    Deviations: counts all tokens in the pool (what recomputing costs), prompt included, over all the group's sequences; SGLang
        compares output lengths first and prompt lengths after them.
    """

    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        """Fewest computed tokens, then latest."""
        return min(enumerate(candidates), key=lambda entry: (entry[1].num_computed_tokens, -entry[0]))[1]
