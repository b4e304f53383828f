"""Shortest remaining processing time, with the true output length."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import SchedulingPolicy, is_number, require, true_output_len
from kvlab.policies.scheduling._displacing import Displacements
from kvlab.types import GroupView, Now


class SrptOracle(SchedulingPolicy):
    """The request with the fewest output tokens left goes first, and sends running ones with more left away when it finds no room.

    Source: the classic (Schrage, 1968: it minimises the mean time in a single-server system); for LLMs, with predictions and limited
        preemption, Shahout et al., "Don't Stop Me Now: Embedding Based Scheduling for LLMs" (2024), https://arxiv.org/abs/2410.01035
    Parameters: displaceable_share: a running request is sent away only during this first share of its output, in [0, 1] (their C;
        1: at any time, 0: never).
    Deviations: only output tokens are work, as there: neither the prompt nor what must be recomputed counts. Requests are sent away
        only for want of room, and only while they decode; one that did so does it again only after a token of its own.
    """

    reads_oracle = True
    preempted_first = False

    def __init__(self, displaceable_share: float = 1.0) -> None:
        require(is_number(displaceable_share) and 0 <= displaceable_share <= 1, self, "displaceable_share", displaceable_share, "in [0, 1]")
        self.displaceable_share = displaceable_share
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._displacements = Displacements()

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """Output tokens left, then arrival (s)."""
        return (self._num_left(group), group.arrival_s)

    def displaces(self, head: GroupView, running: Sequence[GroupView], now: Now) -> GroupView | None:
        """The one with the most left, if that is more than the head has."""
        share = self.displaceable_share
        movable = [group for group in running if group.num_output_tokens < share * true_output_len(self, group)]
        return self._displacements.choose(head, movable, self._num_left, now)

    def ended(self, group: GroupView, now: Now) -> None:
        """Nothing to remember any more."""
        self._displacements.forget(group)

    def _num_left(self, group: GroupView) -> int:
        return max(0, true_output_len(self, group) - group.num_output_tokens)
