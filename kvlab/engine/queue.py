"""The waiting queue: preempted groups first, then the others by the scheduling policy."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

from kvlab.engine.sequence import SequenceGroup
from kvlab.policies.base import SchedulingPolicy
from kvlab.types import IllegalDecision, Now


class WaitingQueue:
    """Groups that wait for (re)admission.

    A static policy's keys are taken once, when a group comes; a dynamic one's anew whenever the head is asked for in a new step.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._preempted: deque[SequenceGroup] = deque()
        self._sorted: list[tuple[tuple[float, ...], int, SequenceGroup]] = []
        self._keyed_at = -1

    def __len__(self) -> int:
        return len(self._preempted) + len(self._sorted)

    def __iter__(self) -> Iterator[SequenceGroup]:
        yield from self._preempted
        for _, _, group in self._sorted:
            yield group

    def _entry(self, group: SequenceGroup, now: Now) -> tuple[tuple[float, ...], int, SequenceGroup]:
        key = self._policy.key(group, now)
        if not isinstance(key, tuple) or any(part != part for part in key):
            raise IllegalDecision("scheduling", self._policy, f"key {key!r} for request {group.request_id!r}", "a tuple of numbers, no NaN")
        return key, group.group_id, group

    def add(self, group: SequenceGroup, now: Now) -> None:
        """A new group."""
        insort(self._sorted, self._entry(group, now))

    def add_preempted(self, group: SequenceGroup) -> None:
        """A preempted group goes to the front."""
        self._preempted.appendleft(group)

    def head(self, now: Now) -> SequenceGroup | None:
        """Who goes first at `now`."""
        if self._preempted:
            return self._preempted[0]
        if not self._sorted:
            return None
        if not self._policy.is_static and self._keyed_at != now.step:
            self._sorted = sorted(self._entry(group, now) for _, _, group in self._sorted)
            self._keyed_at = now.step
        return self._sorted[0][2]

    def pop_head(self) -> SequenceGroup:
        """Take the group that `head` returned."""
        return self._preempted.popleft() if self._preempted else self._sorted.pop(0)[2]

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out (abort)."""
        if group in self._preempted:
            self._preempted.remove(group)
        else:
            self._sorted = [entry for entry in self._sorted if entry[2] is not group]
