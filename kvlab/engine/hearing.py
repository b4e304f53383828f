"""Which policies hear of what happens in the engine (`EngineEvents`): only those that implement an event are called for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlab.engine.config import PolicySet
from kvlab.policies.base import EngineEvents


def hearers(policies: PolicySet, event: str) -> tuple[Callable[..., None], ...]:
    """Bound methods `event` of the scheduling, batching, admission and preemption policies that implement it, in this order."""
    silent: Any = getattr(EngineEvents, event)
    seams = (policies.scheduling, policies.batching, policies.admission, policies.preemption)
    return tuple(getattr(policy, event) for policy in seams if getattr(type(policy), event) is not silent)
