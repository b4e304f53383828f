"""The rules by name, how a broken one is reported, and the watch over what a policy must not call."""

from __future__ import annotations

import builtins
import datetime
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

RULES: dict[str, str] = {
    "contract": "it derives from its seam's contract and implements all of it",
    "constructor": "the constructor only stores parameters, each under its own name",
    "never fails": "no exception on a legal sequence of events",
    "determinism": "the same events give the same decisions, in every object and process",
    "no clock": "time comes from `now` only",
    "seeded": "randomness comes from a seed parameter only",
    "read-only": "views are never written to",
    "no oracle": "the true output length is read only by policies with oracle in their name, or with `reads_oracle`",
    "reset": "after reset() it decides as a new one",
    "total order": "keys are tuples of numbers without NaN",
    "static key": "with is_static the key of a waiting group does not change with time",
    "held key": "the key of a waiting group does not change before the step that key_holds_until said",
    "elementwise key": "with key_is_elementwise the keys of arrays are those of each group",
    "order": "order returns each waiting group once",
    "displacement": "with preempted_first False, one of the running groups, that stands behind the head by key, gives way, or nobody",
    "drains": "all requests end: nobody is sent away and brought back without end",
    "phases": "each alternative is an order of queues, no queue twice",
    "work conserving": "a queue that could be served alone is in some alternative",
    "running order": "running_order returns each running group once",
    "chunk range": "0 <= chunk <= min(num_uncomputed, budget)",
    "progress": "with a fresh budget every sequence computes at least one token",
    "token budget": "a step may compute at least one token",
    "admission answer": "a word says why a group stays out, the empty string lets it in",
    "headroom": "0 <= headroom <= blocks in the pool",
    "victim": "a victim is one of the candidates",
    "mode": "`mode` is a PreemptionMode that answers recompute or swap; `protect_oldest` is true or false",
    "remembers": "a candidate stays one until its evict or hit: victim() forgets nothing",
    "pins": "num_pinned and is_pinned agree on blocks that nobody holds, give_up_pins leaves none, and no release pins another block",
    "bounded metadata": "what it remembers grows with the pool, not with the run",
    "keys": "keys are bytes, differ when tokens, parents or salts differ, and are equal in every object",
    "block size": "a positive integer",
    "placement": "place returns different free ids, as many as asked, exactly where largest_region has room; consecutive if it says so",
    "slots": "one of the slots shown",
    "reservation": "at least the blocks that are needed now",
    "droppable": "only tokens that no later query reads; never fewer than before; none if lossless",
    "storage": "one of float64, float32, float16, bfloat16; a lossless one holds float32",
}

_CLOCKS = {
    getattr(time, name)
    for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for name in (clock, clock + "_ns")
}


class Rules:
    """Reports broken rules of one policy."""

    def __init__(self, seam: str, policy: str) -> None:
        self.seam = seam
        self.policy = policy

    def require(self, ok: bool, rule: str, what: str) -> None:
        """AssertionError that names policy and rule unless `ok`."""
        if not ok:
            raise self.broken(rule, what)

    def broken(self, rule: str, what: str) -> AssertionError:
        """The error for a broken rule."""
        return AssertionError(f"{self.seam} policy {self.policy} breaks the rule '{rule}' ({RULES[rule]}): {what}")

    def same(self, expected: list[object], got: list[object], rule: str, what: str) -> None:
        """Two lists of decisions are equal; else the first difference is named."""
        for index, (one, other) in enumerate(zip(expected, got, strict=False)):
            self.require(one == other, rule, f"{what}: decision {index} is {one!r}, then {other!r}")
        self.require(len(expected) == len(got), rule, f"{what}: {len(expected)} decisions, then {len(got)}")

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call `work` under the watch. An exception of the policy is a broken rule."""
        try:
            with self._watch():
                return work(*arguments)
        except AssertionError:
            raise
        except Exception as error:
            rule = "contract" if isinstance(error, TypeError) and "abstract" in str(error) else "never fails"
            rule = "read-only" if isinstance(error, ReadOnlyError) else rule
            raise self.broken(rule, f"{type(error).__name__}: {error}") from error

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Note calls of clocks, of the global random generator and of hash(), made by anyone in this thread meanwhile."""
        seen: dict[str, str] = {}

        def note(frame: FrameType, event: str, called: Any) -> None:
            if event == "c_call":
                rule = _forbidden(called)
                if rule:
                    seen.setdefault(rule, f"{called!r} called in {frame.f_code.co_name}, line {frame.f_lineno}")

        previous, collecting = sys.getprofile(), gc.isenabled()
        gc.disable()  # callbacks of the garbage collector (other libraries') may read a clock
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(previous)
            if collecting:
                gc.enable()
        for rule, what in seen.items():
            self.require(False, rule, what)


class ReadOnlyError(Exception):
    """A policy wrote to a view."""


def _forbidden(called: Any) -> str:
    """The rule that a call of a C function breaks, or ""."""
    owner = getattr(called, "__self__", None)
    if called in _CLOCKS or (isinstance(owner, type) and issubclass(owner, datetime.date)
                             and called.__name__ in ("now", "utcnow", "today")):  # fmt: skip
        return "no clock"
    if called is os.urandom or owner is random._inst:
        return "seeded"
    return "determinism" if called is builtins.hash else ""


def is_int(value: object) -> bool:
    """Whether it is a whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)
