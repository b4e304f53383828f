"""The contract of policies as a reusable test: for ours, and for one that you write.

    from kvlab.testing import check_policy

    def test_mine():
        check_policy(Mine)                     # a class whose parameters all have defaults
        check_policy(lambda: Mine(alpha=0.5))  # or anything that makes a new one

Random event sequences drive the policy against small, independent models of pool and queues. A broken rule is an AssertionError
that names policy and rule; `RULES` lists them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from random import Random
from typing import Any

from kvlab.policies.base import PreemptionPolicy
from kvlab.policies.preemption.mode import Recompute
from kvlab.policies.registry import SEAMS, seam_of
from kvlab.testing.drivers import DRIVERS
from kvlab.testing.eviction import check_metadata_is_bounded, drive_eviction
from kvlab.testing.rules import RULES, Rules
from kvlab.types import UserError, unknown_name

__all__ = ["RULES", "check_policy"]


def check_policy(policy: type | Callable[[], Any] | object, seam: str | None = None, num_sequences: int = 12) -> None:
    """Run the whole contract of a seam over a policy.

    Args:
        policy: a class, a factory without arguments, or an object (copied for each run).
        seam: the seam it belongs to; None: found from its base class. num_sequences: random event sequences to run.

    Raises:
        AssertionError: a broken rule. UserError: unknown seam, or no policy at all.
    """
    if seam is not None and seam not in SEAMS:
        raise unknown_name("seam", seam, SEAMS)
    cls, make = _factory(policy)
    rules = Rules(seam or (seam_of(cls) if cls else "?"), cls.__name__ if cls else getattr(policy, "__name__", repr(policy)))
    first = rules.run(make)
    if seam is None:
        seam = seam_of(type(first))
    rules = Rules(seam, type(first).__name__)
    rules.require(isinstance(first, SEAMS[seam]), "contract", f"it is no {SEAMS[seam].__name__}")
    if cls is not None:
        _check_constructor(cls, first, rules)
    for seed in range(num_sequences):
        decisions = [rules.run(DRIVERS[seam], make(), Random(seed), rules) for _ in range(2)]
        rules.same(decisions[0], decisions[1], "determinism", f"event sequence {seed}, run twice on new objects")
    _check_reset(make, seam, decisions[0], num_sequences - 1, rules)
    if seam == "eviction":
        rules.run(check_metadata_is_bounded, make(), rules)


def _factory(policy: Any) -> tuple[type | None, Callable[[], Any]]:
    """(the class where one was given, what makes a new policy)."""
    if isinstance(policy, type):
        if issubclass(policy, PreemptionPolicy) and "mode" in inspect.signature(policy).parameters:
            return policy, lambda: policy(mode=Recompute())
        return policy, policy
    if callable(policy):
        return None, policy
    if not any(isinstance(policy, contract) for contract in SEAMS.values()):
        raise UserError(f"{policy!r} is no policy: give a class, a factory without arguments, or a policy object.")
    return None, lambda: copy.deepcopy(policy)


def _check_constructor(cls: type, policy: object, rules: Rules) -> None:
    """Each parameter is kept under its own name."""
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        stored = hasattr(policy, parameter.name)
        rules.require(stored, "constructor", f"parameter {parameter.name} is not kept as an attribute of that name")
        if parameter.default is not parameter.empty:
            value = getattr(policy, parameter.name)
            what = f"parameter {parameter.name} = {parameter.default!r} is kept as {value!r}"
            rules.require(bool(value == parameter.default), "constructor", what)


def _check_reset(make: Callable[[], Any], seam: str, expected: list[object], seed: int, rules: Rules) -> None:
    """A policy that was used and reset decides as a new one, also after a run that broke off. Without `reset` it has no state to lose."""
    policy = make()
    if seam == "eviction":
        rules.run(drive_eviction, policy, Random(seed + 1), rules, False)
    else:
        rules.run(DRIVERS[seam], policy, Random(seed + 1), rules)
    if callable(getattr(policy, "reset", None)):
        rules.run(policy.reset)
    try:
        again = rules.run(DRIVERS[seam], policy, Random(seed), rules)
    except AssertionError as error:  # as new it kept all rules
        raise rules.broken("reset", str(error)) from error
    rules.same(expected, again, "reset", f"event sequence {seed}, after another one and reset()")
