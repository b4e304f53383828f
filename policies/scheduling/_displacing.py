"""Sending running groups away for more urgent ones, without going in circles: shared by the policies that do."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvlab.policies.base import is_decoding
from kvlab.types import GroupView, Now


class Displacements:
    """Who has sent somebody away.

    Two rules keep a run going on. Only a group that decodes is sent away: it has produced a token since it entered, and no prompt is
    computed half for nothing. And a group sends others away again (in a later step) only after it has produced a token itself: one
    that keeps losing its own place for want of blocks does not undo the others' work over and over.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # group id -> (step, its output tokens) when it last sent somebody away

    def choose(self, head: GroupView, running: Iterable[GroupView], rank: Callable[[GroupView], float], now: Now) -> GroupView | None:
        """The group of the highest rank, if that is above the head's (the latest to enter among equals); None: nobody gives way."""
        last = self._last.get(head.group_id)
        if last is not None and last[0] != now.step and head.num_output_tokens <= last[1]:
            return None
        victim, highest = None, rank(head)
        for group in running:
            own = rank(group)
            if (own > highest or (own == highest and victim is not None)) and is_decoding(group):
                victim, highest = group, own
        if victim is not None:
            self._last[head.group_id] = (now.step, head.num_output_tokens)
        return victim

    def forget(self, group: GroupView) -> None:
        """It has ended."""
        self._last.pop(group.group_id, None)
