"""How waiting groups stand behind each other, at the cost of what has changed and of how far a step looks.

    KeptSorted   keys that hold: a sorted list; a group is asked again when its key may have changed
    Drawn        keys or orders of a single step (see `kvlab.engine.order_sources`): drawn as they are looked at, the rest never sorted
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from kvlab.engine.order_sources import Entry, Source, entry_of, incomparable
from kvlab.engine.sequence import SequenceGroup
from kvlab.policies.base import SchedulingPolicy
from kvlab.types import IllegalDecision, Now

MANY_DUE = 64
"""From so many on that are to be asked again in one step, all are sorted anew."""


class Order(Protocol):
    """Groups in order of their turn."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[SequenceGroup]: ...
    def add(self, group: SequenceGroup, now: Now) -> None:
        """A group comes."""
    def sort(self, now: Now) -> None:
        """Stand as `now` asks for; what is asked again in the same step changes nothing."""
    def first(self) -> SequenceGroup | None:
        """Who goes first."""
    def remove(self, group: SequenceGroup) -> None:
        """A group goes."""


class KeptSorted:
    """Keys that hold while a group waits, or until a step that is known."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._sorted: list[Entry] = []
        self._entries: dict[int, Entry] = {}
        self._due: list[tuple[float, int]] = []  # (step from which its key may be another, group id), some of groups that have left

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (group for _, _, group in self._sorted)

    def add(self, group: SequenceGroup, now: Now) -> None:
        """Among the others by its key."""
        entry = entry_of(self._policy, group, now)
        try:
            insort(self._sorted, entry)
        except TypeError as error:
            raise incomparable(self._policy, error, [entry, *self._sorted]) from error
        self._entries[group.group_id] = entry
        self._expect(group, now)

    def _expect(self, group: SequenceGroup, now: Now) -> None:
        if not self._policy.is_static:
            step = self._policy.key_holds_until(group, now)
            if not isinstance(step, (int, float)) or step != step:
                raise IllegalDecision("scheduling", self._policy, f"a key that holds until {step!r}", "a step, or math.inf")
            if step != math.inf:
                heapq.heappush(self._due, (max(step, now.step + 1), group.group_id))

    def sort(self, now: Now) -> None:
        """Ask those again whose keys may have changed."""
        due: dict[int, Entry] = {}
        while self._due and self._due[0][0] <= now.step:
            group_id = heapq.heappop(self._due)[1]
            if group_id in self._entries:
                due[group_id] = self._entries[group_id]
        for group_id, old in due.items():
            self._entries[group_id] = new = entry_of(self._policy, old[2], now)
            if new[0] != old[0] and len(due) < MANY_DUE:
                del self._sorted[bisect_left(self._sorted, old)]
                insort(self._sorted, new)
            self._expect(old[2], now)
        if len(due) >= MANY_DUE:
            self._sorted = sorted(self._entries.values())

    def first(self) -> SequenceGroup | None:
        """Who goes first."""
        return self._sorted[0][2] if self._sorted else None

    def remove(self, group: SequenceGroup) -> None:
        """A group goes."""
        del self._sorted[bisect_left(self._sorted, self._entries.pop(group.group_id))]


class Drawn:
    """Groups that are ordered anew in every step, as far as it looks; newcomers are sorted in until the next one."""

    def __init__(self, policy: SchedulingPolicy, source: Source) -> None:
        self._policy = policy
        self._source = source
        self._groups: dict[int, SequenceGroup] = {}
        self._latest = -1  # the highest number that came: below it, `_groups` are no longer in order of submission
        self._in_order = True
        self._ahead: list[Entry] = []  # drawn, of which those from `_at` on have not been first
        self._at = 0
        self._rest: Iterator[Entry] = iter(())
        self._late: list[Entry] = []  # a heap of those that came since
        self._drawn_at = -1

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        groups = self._groups
        for _, group_id, group in heapq.merge(self._drawn(), _in_order(self._late)):
            if group_id in groups:
                yield group

    def _drawn(self) -> Iterator[Entry]:
        at = self._at
        while at < len(self._ahead) or self._draw_one():
            yield self._ahead[at]
            at += 1

    def _draw_one(self) -> bool:
        """One more of the others; False: that was all."""
        entry = next(self._rest, None)
        if entry is None:
            return False
        self._ahead.append(entry)
        return True

    def add(self, group: SequenceGroup, now: Now) -> None:
        """It stands where its source puts it."""
        entry = self._source.entry(group, now)
        try:
            heapq.heappush(self._late, entry)
        except TypeError as error:
            raise incomparable(self._policy, error, [entry, *self._late]) from error
        self._in_order &= group.group_id > self._latest
        self._latest = max(self._latest, group.group_id)
        self._groups[group.group_id] = group
        self._source.add(group)

    def sort(self, now: Now) -> None:
        """Draw anew, in a new step."""
        if self._drawn_at == now.step:
            return
        self._drawn_at = now.step
        if not self._in_order:
            self._groups, self._in_order = dict(sorted(self._groups.items())), True
        self._ahead, self._at, self._late = [], 0, []
        self._rest = self._source.draw(self._groups, now)
        self._draw_one()

    def _first(self) -> Entry | None:
        """The first that still waits; those that were taken out meanwhile are dropped."""
        groups, late = self._groups, self._late
        while (self._at < len(self._ahead) or self._draw_one()) and self._ahead[self._at][1] not in groups:
            self._at += 1
        while late and late[0][1] not in groups:
            heapq.heappop(late)
        if self._at == len(self._ahead):
            return late[0] if late else None
        drawn = self._ahead[self._at]
        try:
            return late[0] if late and late[0] < drawn else drawn
        except TypeError as error:
            raise incomparable(self._policy, error, [late[0], drawn]) from error

    def first(self) -> SequenceGroup | None:
        """Who goes first."""
        entry = self._first()
        return None if entry is None else entry[2]

    def remove(self, group: SequenceGroup) -> None:
        """A group goes. (One that is not the first is passed over when its turn comes.)"""
        entry = self._first()
        if entry is not None and entry[2] is group:
            if self._late and entry is self._late[0]:
                heapq.heappop(self._late)
            else:
                self._at += 1
        del self._groups[group.group_id]
        self._source.remove(group)


def _in_order(heap: list[Entry]) -> Iterator[Entry]:
    """A heap's entries, smallest first, without taking them out."""
    ahead = [(heap[0], 0)] if heap else []
    while ahead:
        entry, at = heapq.heappop(ahead)
        yield entry
        for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
            heapq.heappush(ahead, (heap[child], child))
