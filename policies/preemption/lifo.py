"""The newest gives way."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import PreemptionPolicy
from kvlab.types import GroupView, Now


class Lifo(PreemptionPolicy):
    """The group that entered running last gives way first, so the oldest always gets on.

    Source: vLLM (Kwon et al., SOSP 2023, section 4.5), https://arxiv.org/abs/2309.06180
    Parameters: mode: how it gives way. protect_oldest: the earliest-admitted running group is never a candidate.
    Deviations: none.
    """

    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        """The last to enter."""
        return candidates[-1]
