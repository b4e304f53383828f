"""The one that gives back the most for what is lost gives way."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import PreemptionPolicy
from kvlab.types import GroupView, Now


class CostAware(PreemptionPolicy):
    """The group that frees the most blocks for each token that must be computed again gives way first; ties go to the one that frees
    more, then to the latest.

    Source: benefit over cost as in Greedy-Dual-Size (Cao and Irani, USITS 1997), applied to victims. Our own composition.
    Parameters: mode: how it gives way. protect_oldest: the earliest-admitted running group is never a candidate.
    Deviations: tokens in published blocks count as kept by the prefix cache, though they may be evicted before the group is back; blocks
        that another group holds too are not freed. The cost is that of recompute whatever the mode.
    """

    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        """Most blocks a lost token. Who loses nothing comes first, unless it frees nothing either."""
        return max(enumerate(candidates), key=lambda entry: (*_worth(entry[1]), entry[0]))[1]


def _worth(group: GroupView) -> tuple[float, int]:
    """(blocks freed a lost token, blocks freed)."""
    freed, lost = group.num_unshared_blocks, group.num_unpublished_tokens
    return (freed / lost if lost else float("inf") if freed else 0.0), freed
