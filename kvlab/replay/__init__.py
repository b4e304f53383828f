"""Replay: an eviction policy on its own, over the block references of a trace, in a second instead of a run.

    from kvlab.replay import replay
    replay("mooncake_conversation", "lru", capacity=5000).prefix_hit_rate

The policy objects and their events are the engine's. Two semantics, which differ, and a figure says which it shows:
`access`, a classic cache simulation (kvlab.replay.access), and `engine`, equal to an engine that serves one request after the other,
request by request (kvlab.replay.engine).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np

from kvlab.policies.base import EvictionPolicy
from kvlab.policies.registry import by_name
from kvlab.replay.access import replay_access
from kvlab.replay.engine import EngineOptions, Served, replay_engine, served_trace
from kvlab.replay.result import ReplayResult, hit_tokens
from kvlab.replay.trace import AccessTrace, as_trace
from kvlab.types import UserError, unknown_name
from kvlab.workload.traces import find_trace

__all__ = ["AccessTrace", "EngineOptions", "ReplayResult", "Served", "as_trace", "check_capacity", "replay"]

SEMANTICS = ("access", "engine")
Trace = str | Path | AccessTrace | Iterable[Sequence[Hashable]] | Iterable[Served]


def replay(
    trace: Trace,
    eviction: str | EvictionPolicy | type[EvictionPolicy] = "lru",
    capacity: int | float = 1000,
    semantics: str = "access",
    limit: int | None = None,
    options: EngineOptions | None = None,
) -> ReplayResult:
    """Replay a trace through one eviction policy.

    Args:
        trace: a file's path, or its name in the folder KVLAB_TRACES (kvlab.replay.trace says which formats). Semantics access also
            takes an AccessTrace or requests as sequences of block ids, semantics engine also requests as `Served`.
        eviction: a name, a class, or an object; an object is copied, so that it may be replayed again.
        capacity: blocks (an integer); with semantics access also a share of the trace's distinct blocks (a float in (0, 1)).
        semantics: "access" or "engine". limit: only the first so many requests.
        options: block size and step size of the engine (semantics engine only).

    Raises:
        UserError: unknown name, capacity below 1, unreadable or malformed trace. IllegalDecision: a policy's fault.
    """
    if semantics not in SEMANTICS:
        raise unknown_name("semantics", semantics, SEMANTICS)
    policy = _policy(eviction)
    name = eviction if isinstance(eviction, str) else type(policy).__name__
    check_capacity(capacity, semantics)
    if limit is not None and limit < 1:
        raise UserError(f"limit = {limit!r} is not allowed: at least 1 request (leave it out for all).")
    if semantics == "engine":
        return _replay_engine(trace, policy, name, int(capacity), limit, options or EngineOptions())
    if options is not None:
        raise UserError("options (block size and step size of the engine) have no effect with semantics access. Leave them out.")
    accesses = as_trace(trace, limit)
    num_blocks = max(1, int(capacity * accesses.num_unique_blocks)) if isinstance(capacity, float) else capacity
    object_hits, prefix_hits, evicted = replay_access(accesses, policy, num_blocks)
    lengths = accesses.input_lengths
    return ReplayResult(
        trace=accesses.name,
        policy=name,
        semantics=semantics,
        capacity=num_blocks,
        num_blocks_per_request=np.fromiter(map(len, accesses.blocks), dtype=np.int32, count=len(accesses.blocks)),
        object_hits_per_request=object_hits,
        prefix_hits_per_request=prefix_hits,
        hit_tokens_per_request=hit_tokens(accesses, prefix_hits),
        tokens_per_request=None if lengths is None else np.asarray(lengths, dtype=np.int64),
        evicted=tuple(evicted),
    )


def check_capacity(capacity: int | float, semantics: str = "access") -> None:
    """UserError unless it is a number of blocks, or for semantics access a share of the working set."""
    if isinstance(capacity, float) and 0 < capacity < 1:
        if semantics == "engine":
            raise UserError(f"capacity = {capacity!r}: semantics engine takes blocks (an integer), since outputs take room as well.")
        return
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise UserError(f"capacity = {capacity!r} is not allowed: blocks (an integer of at least 1), or a share in (0, 1).")


def _replay_engine(trace: Trace, policy: EvictionPolicy, name: str, capacity: int, limit: int | None,
                   options: EngineOptions) -> ReplayResult:  # fmt: skip
    if isinstance(trace, (str, Path)):
        path = find_trace(trace)
        return replay_engine(served_trace(path, options, limit), policy, name, capacity, options, path.name)
    if isinstance(trace, AccessTrace):
        raise UserError("Semantics engine needs lengths and tokens: give a Mooncake file's path, or requests as kvlab.replay.Served.")
    served: list[Served] = []
    for item in trace:
        if not isinstance(item, Served):
            raise UserError(f"Semantics engine takes a Mooncake file's path, or requests as kvlab.replay.Served; got {item!r:.60}.")
        served.append(item)
    return replay_engine(served[:limit], policy, name, capacity, options, "requests")


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
