"""The waiting queue: preempted groups first (unless the scheduling policy sorts them in), then the others by the scheduling policy. And
what policies see of all three queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seqs
from itertools import chain
from typing import TYPE_CHECKING

from kvlab.engine.order_sources import ByColumns, ByKey, ByOrder, entry_of, incomparable
from kvlab.engine.orders import Drawn, KeptSorted, Order
from kvlab.engine.prefixes import Prefixes
from kvlab.engine.read_only import ReadOnly
from kvlab.engine.sequence import SequenceGroup
from kvlab.policies.base import SchedulingPolicy
from kvlab.types import Now

if TYPE_CHECKING:
    from kvlab.engine.scheduler import Scheduler


class WaitingQueue:
    """Groups that wait for (re)admission.

    Keys that hold are taken when a group comes; others, and the order of a policy that orders the whole queue, anew whenever the head is
    asked for in a new step (see `kvlab.engine.orders`). Such an order is kept for the rest of its step, newcomers last.
    """

    def __init__(self, policy: SchedulingPolicy, prefixes: Prefixes) -> None:
        self._policy = policy
        self._orders = type(policy).order is not SchedulingPolicy.order
        self._preempted: deque[SequenceGroup] = deque()
        self._prefixes = prefixes
        self._others = _order_for(policy, prefixes)

    def __len__(self) -> int:
        return len(self._preempted) + len(self._others)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return chain(self._preempted, self._others)

    def add(self, group: SequenceGroup, now: Now) -> None:
        """A new group."""
        self._others.add(group, now)

    def add_preempted(self, group: SequenceGroup, now: Now) -> None:
        """A preempted group goes to the front, or where its key puts it."""
        if self._policy.preempted_first:
            self._preempted.appendleft(group)
        else:
            self._others.add(group, now)

    def head(self, now: Now) -> SequenceGroup | None:
        """Who goes first at `now`."""
        if self._preempted:
            return self._preempted[0]
        if not len(self._others):
            return None
        self._others.sort(now)
        return self._others.first()

    def sort(self, now: Now) -> None:
        """Take keys or order anew, once a step, where they may have changed."""
        self._others.sort(now)

    def in_order(self, groups: Seqs[SequenceGroup], now: Now) -> list[SequenceGroup]:
        """Groups as the policy sorts them: by key, or in order of submission where it orders the whole queue."""
        if self._orders:
            return sorted(groups, key=lambda group: group.group_id)
        entries = [entry_of(self._policy, group, now) for group in groups]
        try:
            return [group for _, _, group in sorted(entries)]
        except TypeError as error:
            raise incomparable(self._policy, error, entries) from error

    def pop_head(self) -> SequenceGroup:
        """Take the group that `head` returned."""
        if self._preempted:
            return self._preempted.popleft()
        group = self._others.first()
        assert group is not None
        self._others.remove(group)
        return group

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out (abort)."""
        if group in self._preempted:
            self._preempted.remove(group)
        else:
            self._others.remove(group)


def _order_for(policy: SchedulingPolicy, prefixes: Prefixes) -> Order:
    """The cheapest that gives the policy's order."""
    if type(policy).order is not SchedulingPolicy.order:
        return Drawn(policy, ByOrder(policy, prefixes, prefixes.forget))
    if policy.is_static or type(policy).key_holds_until is not SchedulingPolicy.key_holds_until:
        return KeptSorted(policy)
    return Drawn(policy, ByColumns(policy) if policy.key_is_elementwise else ByKey(policy))


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
