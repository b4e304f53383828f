"""The waiting queue: preempted groups first (unless the scheduling policy sorts them in), then the others by the scheduling policy. And
what policies see of all three queues."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seqs
from typing import TYPE_CHECKING

from kvlab.engine.read_only import ReadOnly
from kvlab.engine.sequence import SequenceGroup
from kvlab.policies.base import PrefixesView, SchedulingPolicy
from kvlab.types import IllegalDecision, Now

if TYPE_CHECKING:
    from kvlab.engine.scheduler import Scheduler

Entry = tuple[tuple[float, ...], int, SequenceGroup]


class WaitingQueue:
    """Groups that wait for (re)admission.

    A static policy's keys are taken once, when a group comes; a dynamic one's, and the order of a policy that orders the whole queue,
    anew whenever the head is asked for in a new step. Such an order is kept for the rest of its step, newcomers last.
    """

    def __init__(self, policy: SchedulingPolicy, prefixes: PrefixesView) -> None:
        self._policy = policy
        self._prefixes = prefixes
        self._orders = type(policy).order is not SchedulingPolicy.order
        self._preempted: deque[SequenceGroup] = deque()
        self._sorted: list[Entry] = []
        self._keyed_at = -1

    def __len__(self) -> int:
        return len(self._preempted) + len(self._sorted)

    def __iter__(self) -> Iterator[SequenceGroup]:
        yield from self._preempted
        for _, _, group in self._sorted:
            yield group

    def entry(self, group: SequenceGroup, now: Now) -> Entry:
        """Its key and number, for sorting."""
        if self._orders:
            return (), group.group_id, group
        key = self._policy.key(group, now)
        if not isinstance(key, tuple) or any(part != part for part in key):
            raise IllegalDecision("scheduling", self._policy, f"key {key!r} for request {group.request_id!r}", "a tuple of numbers, no NaN")
        return key, group.group_id, group

    def add(self, group: SequenceGroup, now: Now) -> None:
        """A new group."""
        entry = self.entry(group, now)
        if self._orders:
            self._sorted.append(entry)
            return
        try:
            insort(self._sorted, entry)
        except TypeError as error:
            raise self._incomparable(error, [entry, *self._sorted]) from error

    def add_preempted(self, group: SequenceGroup, now: Now) -> None:
        """A preempted group goes to the front, or where its key puts it."""
        if self._policy.preempted_first:
            self._preempted.appendleft(group)
        else:
            self.add(group, now)

    def head(self, now: Now) -> SequenceGroup | None:
        """Who goes first at `now`."""
        if self._preempted:
            return self._preempted[0]
        if not self._sorted:
            return None
        self.sort(now)
        return self._sorted[0][2]

    def sort(self, now: Now) -> None:
        """Take keys or order anew, once a step, where they may have changed."""
        if self._keyed_at == now.step or (self._policy.is_static and not self._orders):
            return
        self._keyed_at = now.step
        if not self._orders:
            self._sorted = self._in_order([self.entry(group, now) for _, _, group in self._sorted])
            return
        waiting = sorted((group for _, _, group in self._sorted), key=lambda group: group.group_id)
        answer: object = self._policy.order(tuple(waiting), self._prefixes, now)
        ordered = list(answer) if isinstance(answer, Iterable) else []
        if len(ordered) != len(waiting) or {id(group) for group in ordered} != {id(group) for group in waiting}:
            raise IllegalDecision("scheduling", self._policy, f"an order of {len(ordered)} groups",
                                  f"each of the {len(waiting)} that wait, once")  # fmt: skip
        self._sorted = [((), group.group_id, group) for group in ordered]

    def in_order(self, groups: Seqs[SequenceGroup], now: Now) -> list[SequenceGroup]:
        """Groups as the policy sorts them."""
        return [group for _, _, group in self._in_order([self.entry(group, now) for group in groups])]

    def _in_order(self, entries: Seqs[Entry]) -> list[Entry]:
        try:
            return sorted(entries)
        except TypeError as error:
            raise self._incomparable(error, entries) from error

    def _incomparable(self, error: TypeError, entries: Seqs[Entry]) -> IllegalDecision:
        """Of entries whose keys have no order."""
        keys = list(dict.fromkeys(repr(key) for key, _, _ in entries))[:3]
        return IllegalDecision("scheduling", self._policy, f"keys {', '.join(keys)} ... ({error})",
                               "tuples of numbers, which can be compared with each other")  # fmt: skip

    def pop_head(self) -> SequenceGroup:
        """Take the group that `head` returned."""
        return self._preempted.popleft() if self._preempted else self._sorted.pop(0)[2]

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out (abort)."""
        if group in self._preempted:
            self._preempted.remove(group)
        else:
            self._sorted = [entry for entry in self._sorted if entry[2] is not group]


class Queues:
    """What policies see of the queues (`QueuesView`)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def waiting(self) -> Seqs[SequenceGroup]:
        """Preempted first, then by the scheduling policy."""
        return tuple(self._scheduler.waiting)

    @property
    def running(self) -> Seqs[SequenceGroup]:
        """In order of entry."""
        return ReadOnly(self._scheduler.running)

    @property
    def swapped(self) -> Seqs[SequenceGroup]:
        """In order of return."""
        return ReadOnly(self._scheduler.swapped)

    @property
    def num_waiting(self) -> int:
        """Length of `waiting`."""
        return len(self._scheduler.waiting)
