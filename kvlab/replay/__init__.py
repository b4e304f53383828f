"""Replay: an eviction policy on its own, over the block references of a trace, in a second instead of a run.

    import kvlab
    kvlab.replay("mooncake_conversation", eviction="lru", capacity=5000).prefix_hit_rate
    kvlab.replay.sweep("mooncake_conversation", ["lru", "sieve"], ["8GiB", 0.1], model="llama3_8b", jobs=2).frame
    kvlab.replay.lru_curve("mooncake_conversation").frame                    # LRU at all capacities, in one pass

The policy objects and their events are the engine's. Two semantics, which differ, and a figure says which it shows:
`access`, a classic cache simulation (kvlab.replay.access), and `engine`, equal to an engine that serves one request after the other,
request by request (kvlab.replay.engine). Formats: kvlab.replay.trace; public traces by name: kvlab.workload.public_traces.

This module can be called: `kvlab.replay(...)` is `kvlab.replay.replay(...)`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from kvlab.replay.capacity import kv_bytes_per_token, parse_capacity
from kvlab.replay.curve import LruCurve, lru_curve
from kvlab.replay.engine import EngineOptions, Served
from kvlab.replay.job import SEMANTICS, Eviction, Job, Trace
from kvlab.replay.result import ReplayResult
from kvlab.replay.sweeping import Failure, Sweep, run_points
from kvlab.replay.trace import AccessTrace, ReadOptions, as_trace
from kvlab.types import UserError

__all__ = [
    "SEMANTICS", "AccessTrace", "EngineOptions", "Failure", "LruCurve", "ReadOptions", "ReplayResult", "Served", "Sweep", "as_trace",
    "kv_bytes_per_token", "lru_curve", "parse_capacity", "replay", "sweep",
]  # fmt: skip


def replay(
    trace: Trace,
    eviction: Eviction = "lru",
    capacity: int | float | str = 1000,
    semantics: str = "access",
    limit: int | None = None,
    options: EngineOptions | None = None,
    *,
    warmup: int | float = 0,
    capacity_unit: str | None = None,
    model: Any = None,
    kv_dtype: str = "bfloat16",
    reading: ReadOptions | None = None,
) -> ReplayResult:
    """Replay a trace through one eviction policy.

    Args:
        trace: a file's path, or a trace's name: looked for in the folders of KVLAB_TRACES, a public one fetched if it is in none
            (kvlab.replay.trace says which formats). Semantics access also takes an AccessTrace or requests as sequences of block
            ids, semantics engine also requests as `Served`.
        eviction: a name, a class, or an object; an object is copied, so that it may be replayed again.
        capacity: blocks (5000), tokens ("40000tok"), bytes of `model` ("8GiB"), or, with semantics access, a share of the trace's
            distinct blocks (0.1, "10%"). capacity_unit: what a plain number is (blocks, tokens, bytes, share).
        semantics: "access" or "engine". limit: only the first so many requests.
        options: block size and step size of the engine (semantics engine only).
        warmup: requests at the beginning (or a share of them, 0.1) that fill the cache and are in no figure.
        model, kv_dtype: whose K and V a capacity in bytes is of; see `kv_bytes_per_token`.
        reading: how a file is read: block size and tokenizer of texts ... (`ReadOptions`).

    Raises:
        UserError: unknown name, a wrong capacity or warm-up, unreadable or malformed trace. IllegalDecision: a policy's fault.
    """
    tests = [(eviction, capacity)]
    return Job.of(trace, semantics, limit, options, warmup, capacity_unit, model, kv_dtype, reading, tests).run(eviction, capacity)


def sweep(
    trace: Trace,
    eviction: Eviction | Sequence[Eviction] = "lru",
    capacity: object | Sequence[object] = 1000,
    semantics: str = "access",
    limit: int | None = None,
    options: EngineOptions | None = None,
    *,
    warmup: int | float = 0,
    capacity_unit: str | None = None,
    model: Any = None,
    kv_dtype: str = "bfloat16",
    reading: ReadOptions | None = None,
    jobs: int = 1,
    keep_going: bool = False,
) -> Sweep:
    """Every policy at every capacity, over a trace that is read once; results by policy, then capacity, in the order given.

    Args:
        jobs: processes. keep_going: points that fail are in `Sweep.failures` instead of ending it. The rest: see `replay`.

    Raises:
        UserError: as `replay`. KvlabError: a policy's fault. Both name the policy and the capacity.
    """
    evictions: list[Eviction] = [*eviction] if isinstance(eviction, (list, tuple)) else [eviction]  # type: ignore[list-item]
    capacities: list[object] = [*capacity] if isinstance(capacity, (list, tuple)) else [capacity]
    tests = [(one, size) for one in evictions for size in capacities]
    if not tests:
        raise UserError("A sweep needs at least one eviction policy and one capacity.")
    job = Job.of(trace, semantics, limit, options, warmup, capacity_unit, model, kv_dtype, reading, tests)
    results: list[ReplayResult] = []
    failures: list[Failure] = []
    for point in run_points(job, evictions, capacities, jobs):
        if isinstance(point, ReplayResult):
            results.append(point)
        elif keep_going:
            failures.append(point)
        else:
            raise point.error()
    return Sweep(tuple(results), tuple(failures))


class _CallableModule(ModuleType):
    """`kvlab.replay(...)`."""

    __call__ = staticmethod(replay)


sys.modules[__name__].__class__ = _CallableModule
