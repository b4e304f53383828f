"""A policy object (and a runner) serves one engine at a time: two that share it would change each other's decisions in silence.

An engine takes its objects over when it is made. That is refused while the engine that had them has requests; one that had them and was
idle takes no request afterwards. So the same object can be given to one run after the other, and never to two at once. The rule holds for
policies without state too: whether a class keeps any can't be seen from outside, and one rule is easier to remember than two.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import fields
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvlab.engine.config import PolicySet
from kvlab.engine.runners.base import Runner
from kvlab.policies import base
from kvlab.types import UserError

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine

_owners: WeakValueDictionary[int, Engine] = WeakValueDictionary()
"""id of an object -> the engine that has it. An engine keeps its objects alive, so an id means one object as long as its owner lives."""
_lock = Lock()

MOST_INNER = 64
"""Longer lists and dicts in a policy are its state, not policies that it wraps."""

_POLICIES = (base.SchedulingPolicy, base.BatchingPolicy, base.AdmissionPolicy, base.PreemptionPolicy, base.PreemptionMode,
             base.EvictionPolicy, base.PrefixCachePolicy, base.BlockSizingPolicy, base.LayoutPolicy, base.CompressionPolicy,
             base.KVDtypePolicy)  # fmt: skip


class Owned:
    """The objects of one engine.

    Args:
        engine: whose they are from now on. policies, runner: what it is made with; policies that others wrap count too.

    Raises:
        UserError: one of them serves an engine that has requests. Nothing has changed hands then.
    """

    def __init__(self, engine: Engine, policies: PolicySet, runner: Runner) -> None:
        self._engine = engine
        self._objects = list(_objects_of(policies, runner))
        self._lost = ""
        with _lock:
            busy = self._find_busy()
            if busy is not None and gc.collect():  # it may be one that nobody holds any more
                busy = self._find_busy()
            if busy is not None:
                name, num_requests = busy
                raise UserError(
                    f"{name} serves another engine, which has {num_requests} unfinished requests: an object serves one engine at a time. "
                    "Make a new one for each engine, or finish that one's requests first (or close() it)."
                )
            for name, thing in self._objects:
                if (other := _owners.get(id(thing))) is not None:
                    other.owned.lose(f"its {name} has been given to another engine since")
                _owners[id(thing)] = engine

    def _find_busy(self) -> tuple[str, int] | None:
        owners = ((name, _owners.get(id(thing))) for name, thing in self._objects)
        return next(((name, len(other.groups)) for name, other in owners if other is not None and other.has_work), None)

    def lose(self, why: str) -> None:
        """They are not this engine's any more."""
        self._lost = self._lost or why

    def check(self) -> None:
        """UserError: another engine has taken one of them over, or they have been given back."""
        if self._lost:
            raise UserError(f"This engine takes no more requests: {self._lost}. Make a new object for each engine.")

    def give_back(self) -> None:
        """They are nobody's."""
        self.lose("it was closed")
        with _lock:
            for _, thing in self._objects:
                if _owners.get(id(thing)) is self._engine:
                    del _owners[id(thing)]


def _objects_of(policies: PolicySet, runner: Runner) -> Iterator[tuple[str, object]]:
    seen: set[int] = set()
    for part in fields(policies):
        yield from _with_inner(part.name, getattr(policies, part.name), seen)
    yield f"runner {type(runner).__name__}", runner


def _with_inner(seam: str, policy: object, seen: set[int]) -> Iterator[tuple[str, object]]:
    """A policy and those that it wraps: its attributes, and what stands in a short list or dict there."""
    if not isinstance(policy, _POLICIES) or id(policy) in seen:
        return
    seen.add(id(policy))
    yield f"{seam} policy {type(policy).__name__}", policy
    for value in getattr(policy, "__dict__", {}).values():
        many = list(value.values()) if isinstance(value, dict) and len(value) <= MOST_INNER else value
        for inner in many if isinstance(many, (list, tuple)) and len(many) <= MOST_INNER else (value,):
            yield from _with_inner(seam, inner, seen)
