"""The one that gives back the most room gives way."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import PreemptionPolicy
from kvlab.types import GroupView, Now


class MostBlocks(PreemptionPolicy):
    """The group whose leaving frees the most blocks gives way first, so that few have to; ties go to the latest.

    Source: the classic choice of a victim by the room it gives back (e.g. the largest process that Linux's out-of-memory killer ends,
        https://docs.kernel.org/mm/oom.html), for blocks.
    Parameters: mode: how it gives way. protect_oldest: the earliest-admitted running group is never a candidate.
    Deviations: blocks that another group holds too are not freed by its leaving, and are not counted.
    """

    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        """Most blocks of its own, then latest."""
        return max(enumerate(candidates), key=lambda entry: (entry[1].num_unshared_blocks, entry[0]))[1]
