"""Where the order of a step comes from: each group's key, the keys of all groups at once, or the policy's own order of the queue."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvlab.engine.sequence import SequenceGroup
from kvlab.policies.base import PrefixesView, SchedulingPolicy
from kvlab.types import IllegalDecision, Now

Entry = tuple[tuple[float, ...], int, SequenceGroup]
"""A key, smallest first, and the group's number and itself."""
Floats = npt.NDArray[np.float64]
NUM_PICKED = 64
"""Groups that are picked out of all and sorted, at first; four times as many once those have gone."""


def entry_of(policy: SchedulingPolicy, group: SequenceGroup, now: Now) -> Entry:
    """Its key and number. IllegalDecision: that is no key."""
    key = policy.key(group, now)
    if not isinstance(key, tuple):
        raise bad_key(policy, key, group)
    for part in key:
        if part != part:
            raise bad_key(policy, key, group)
    return key, group.group_id, group


def bad_key(policy: SchedulingPolicy, key: object, group: SequenceGroup) -> IllegalDecision:
    """A key that says nothing."""
    return IllegalDecision("scheduling", policy, f"key {key!r} for request {group.request_id!r}", "a tuple of numbers, no NaN")


def incomparable(policy: SchedulingPolicy, error: TypeError, entries: Iterable[Entry]) -> IllegalDecision:
    """Of entries whose keys have no order."""
    keys = list(dict.fromkeys(repr(key) for key, _, _ in entries))[:3]
    return IllegalDecision("scheduling", policy, f"keys {', '.join(keys)} ... ({error})",
                           "tuples of numbers, which can be compared with each other")  # fmt: skip


class Source(Protocol):
    """Where a step's order comes from."""

    def add(self, group: SequenceGroup) -> None:
        """A group waits from now on."""
    def remove(self, group: SequenceGroup) -> None:
        """It does no longer."""
    def draw(self, groups: dict[int, SequenceGroup], now: Now) -> Iterator[Entry]:
        """All `groups` (by number, in order of submission), in order. Everything that may change is read before the first is given."""
    def entry(self, group: SequenceGroup, now: Now) -> Entry:
        """Of one that comes after the others were drawn."""


class ByKey:
    """Each group is asked for its key."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy

    def add(self, group: SequenceGroup) -> None:
        """Nothing to keep."""

    def remove(self, group: SequenceGroup) -> None:
        """Nothing to forget."""

    def entry(self, group: SequenceGroup, now: Now) -> Entry:
        """By its key."""
        return entry_of(self._policy, group, now)

    def draw(self, groups: dict[int, SequenceGroup], now: Now) -> Iterator[Entry]:
        """All keys, smallest first."""
        policy = self._policy
        entries = [entry_of(policy, group, now) for group in groups.values()]
        try:
            heapq.heapify(entries)
        except TypeError as error:
            raise incomparable(policy, error, entries) from error
        return self._popped(entries)

    def _popped(self, heap: list[Entry]) -> Iterator[Entry]:
        try:
            while heap:
                yield heapq.heappop(heap)
        except TypeError as error:
            raise incomparable(self._policy, error, heap) from error


class Columns:
    """Groups as one `GroupView`: each attribute is an array with one number a group. (What it says of a group that waits is fixed.)"""

    def __init__(self, groups: Iterable[SequenceGroup] = ()) -> None:
        self.groups = list(groups)
        self._columns: dict[str, Floats] = {}

    def __getattr__(self, name: str) -> Floats:
        if name.startswith("_"):
            raise AttributeError(name)
        column = self._columns.get(name, np.empty(0))
        if len(column) < len(self.groups):
            values = [getattr(group, name) for group in self.groups[len(column) :]]
            new = np.array(values, dtype=np.float64)
            if new.tolist() != values:
                raise ValueError(f"{name} holds numbers that no float64 does")
            column = self._columns[name] = np.concatenate((column, new))
        return column

    def keep(self, rows: npt.NDArray[np.intp]) -> None:
        """Only these groups."""
        self.groups = [self.groups[row] for row in rows.tolist()]
        self._columns = {name: column[rows] for name, column in self._columns.items() if len(column) > rows.max(initial=-1)}


class ByColumns(ByKey):
    """All are asked at once, as arrays."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        super().__init__(policy)
        self._columns = Columns()
        self._rows: dict[int, int] = {}
        self._waits = np.empty(0, dtype=np.bool_)

    def add(self, group: SequenceGroup) -> None:
        """A row more."""
        row = len(self._columns.groups)
        if row == len(self._waits):
            self._waits = np.concatenate((self._waits, np.zeros(row + NUM_PICKED, dtype=np.bool_)))
        self._waits[row] = True
        self._rows[group.group_id] = row
        self._columns.groups.append(group)

    def remove(self, group: SequenceGroup) -> None:
        """A row that counts no longer."""
        self._waits[self._rows.pop(group.group_id)] = False

    def draw(self, groups: dict[int, SequenceGroup], now: Now) -> Iterator[Entry]:
        """All keys, of which the smallest are sorted."""
        columns = self._columns
        if len(columns.groups) > 2 * len(self._rows) + NUM_PICKED:
            columns.keep(np.flatnonzero(self._waits[: len(columns.groups)]))
            self._waits = np.ones(len(columns.groups), dtype=np.bool_)
            self._rows = {group.group_id: row for row, group in enumerate(columns.groups)}
        rows = np.flatnonzero(self._waits[: len(columns.groups)])
        return self._smallest_first(keys_of_all(self._policy, columns, now), rows)

    def _smallest_first(self, keys: list[Floats], rows: npt.NDArray[np.intp]) -> Iterator[Entry]:
        groups, num = self._columns.groups, NUM_PICKED
        for row in rows[np.any([np.isnan(part[rows]) for part in keys], axis=0)].tolist() if keys else ():
            raise bad_key(self._policy, tuple(part[row].item() for part in keys), groups[row])
        numbers = self._columns.group_id
        while len(rows):
            chosen = rows
            if keys and len(rows) > num:  # those up to the num-th smallest first part, and all that equal it
                is_small = keys[0][rows] <= np.partition(keys[0][rows], num - 1)[num - 1]
                chosen, rows = rows[is_small], rows[~is_small]
            else:
                rows = rows[:0]
            chosen = chosen[np.lexsort([numbers[chosen], *(part[chosen] for part in reversed(keys))])]
            for row in chosen.tolist():
                yield tuple(part[row].item() for part in keys), groups[row].group_id, groups[row]
            num *= 4


def keys_of_all(policy: SchedulingPolicy, columns: Columns, now: Now) -> list[Floats]:
    """The parts of all keys, for each group of `columns`. IllegalDecision: `key` does not go through with arrays."""
    groups: Any = columns
    try:
        with np.errstate(divide="raise", invalid="raise"):
            key: Any = policy.key(groups, now)
        if not isinstance(key, tuple):
            raise TypeError(f"it is {key!r}")
        return [np.broadcast_to(np.asarray(part, dtype=np.float64), len(columns.groups)) for part in key]
    except (TypeError, ValueError, ArithmeticError) as error:
        raise IllegalDecision("scheduling", policy, f"the keys of {len(columns.groups)} groups at once ({error})",
                              "with key_is_elementwise, a tuple of arithmetic on the groups' numbers") from error  # fmt: skip


class ByOrder:
    """The policy orders all that wait. Newcomers come last."""

    def __init__(self, policy: SchedulingPolicy, prefixes: PrefixesView, left: Callable[[SequenceGroup], None]) -> None:
        self._policy = policy
        self._prefixes = prefixes
        self._left = left
        self._num_late = count()

    def add(self, group: SequenceGroup) -> None:
        """Nothing to keep."""

    def remove(self, group: SequenceGroup) -> None:
        """What was found of its prefix is worth nothing any more."""
        self._left(group)

    def entry(self, group: SequenceGroup, now: Now) -> Entry:
        """Behind all others."""
        return (1, next(self._num_late)), group.group_id, group

    def draw(self, groups: dict[int, SequenceGroup], now: Now) -> Iterator[Entry]:
        """As the policy says. A sequence is checked at once, an iterator as it goes."""
        waiting = tuple(groups.values())
        answer: Any = self._policy.order(waiting, self._prefixes, now)
        if isinstance(answer, Sequence):
            if len(answer) != len(waiting) or set(map(id, answer)) != set(map(id, waiting)):
                raise self._bad_order(len(answer), len(waiting))
            return (((0, place), group.group_id, group) for place, group in enumerate(answer))
        if not isinstance(answer, Iterable):
            raise self._bad_order(0, len(waiting))
        return self._checked(answer, dict(groups))

    def _checked(self, ordered: Iterable[Any], left: dict[int, SequenceGroup]) -> Iterator[Entry]:
        num = len(left)
        for place, group in enumerate(ordered):
            found = left.pop(getattr(group, "group_id", -1), None)
            if found is None or found is not group:
                raise self._bad_order(place + 1, num)
            yield (0, place), found.group_id, found
        if left:
            raise self._bad_order(num - len(left), num)

    def _bad_order(self, num_given: int, num_waiting: int) -> IllegalDecision:
        return IllegalDecision("scheduling", self._policy, f"an order of {num_given} groups", f"each of the {num_waiting} that wait, once")
