"""Replay: an eviction policy on its own, over the block references of a trace, in a second instead of a run.

    from kvlab.replay import replay
    replay("conversation_trace.jsonl", "lru", capacity=5000).prefix_hit_rate

The policy objects and their events are the engine's. Two semantics, which differ, and a figure says which it shows:
`access` (a classic cache simulation: kvlab.replay.access) and `engine` (equal to the engine, request by request).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np

from kvlab.policies.base import EvictionPolicy
from kvlab.policies.registry import by_name
from kvlab.replay.access import replay_access
from kvlab.replay.result import ReplayResult, hit_tokens
from kvlab.replay.trace import AccessTrace, as_trace
from kvlab.types import UserError, unknown_name

__all__ = ["AccessTrace", "ReplayResult", "as_trace", "check_capacity", "replay"]

SEMANTICS = ("access",)


def replay(
    trace: str | Path | AccessTrace | Iterable[Sequence[Hashable]],
    eviction: str | EvictionPolicy | type[EvictionPolicy] = "lru",
    capacity: int | float = 1000,
    semantics: str = "access",
    limit: int | None = None,
) -> ReplayResult:
    """Replay a trace through one eviction policy.

    Args:
        trace: path of a trace (see kvlab.replay.trace), an AccessTrace, or requests as sequences of block ids.
        eviction: a name, a class, or an object; an object is copied, so that it may be replayed again.
        capacity: blocks (an integer), or a share of the trace's distinct blocks (a float in (0, 1)).
        semantics: "access". limit: only the first so many requests.

    Raises:
        UserError: unknown name, capacity below 1, unreadable or malformed trace. IllegalDecision: a policy's fault.
    """
    if semantics not in SEMANTICS:
        raise unknown_name("semantics", semantics, SEMANTICS)
    policy = _policy(eviction)
    num_blocks = check_capacity(capacity)
    accesses = as_trace(trace, limit)
    if isinstance(capacity, float):
        num_blocks = max(1, int(capacity * accesses.num_unique_blocks))
    object_hits, prefix_hits, evicted = replay_access(accesses, policy, num_blocks)
    lengths = accesses.input_lengths
    return ReplayResult(
        trace=accesses.name,
        policy=eviction if isinstance(eviction, str) else type(policy).__name__,
        semantics=semantics,
        capacity=num_blocks,
        num_blocks_per_request=np.fromiter(map(len, accesses.blocks), dtype=np.int32, count=len(accesses.blocks)),
        object_hits_per_request=object_hits,
        prefix_hits_per_request=prefix_hits,
        hit_tokens_per_request=hit_tokens(accesses, prefix_hits),
        tokens_per_request=None if lengths is None else np.asarray(lengths, dtype=np.int64),
        evicted=tuple(evicted),
    )


def _policy(eviction: str | EvictionPolicy | type[EvictionPolicy]) -> EvictionPolicy:
    """A fresh policy from a name, class or object."""
    if isinstance(eviction, str):
        policy: EvictionPolicy = by_name("eviction", eviction)
        return policy
    if isinstance(eviction, type) and issubclass(eviction, EvictionPolicy):
        return eviction()
    if isinstance(eviction, EvictionPolicy):
        return copy.deepcopy(eviction)
    raise UserError(f"eviction = {eviction!r} is not allowed: a name such as 'lru', or an EvictionPolicy class or object.")


def check_capacity(capacity: int | float) -> int:
    """Blocks, or 0 for a share still to be multiplied with the working set. UserError: neither."""
    if isinstance(capacity, float) and 0 < capacity < 1:
        return 0
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise UserError(f"capacity = {capacity!r} is not allowed: blocks (an integer of at least 1), or a share in (0, 1).")
    return capacity
