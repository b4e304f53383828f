"""A trace that was read and how to replay it: what one point, a sweep and the command line have in common."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.policies.base import EvictionPolicy
from kvlab.policies.registry import by_name, made
from kvlab.replay.access import replay_access
from kvlab.replay.capacity import Capacity, kv_bytes_per_token, parse_capacity
from kvlab.replay.engine import EngineOptions, Served, open_served, real_block_tokens, replay_engine
from kvlab.replay.result import ReplayResult, hit_tokens, num_warm
from kvlab.replay.trace import AccessTrace, ReadOptions, as_trace
from kvlab.types import UserError, unknown_name

SEMANTICS = ("access", "engine")
Eviction = str | EvictionPolicy | type[EvictionPolicy]
Trace = str | Path | AccessTrace | Iterable[Sequence[Hashable]] | Iterable[Served]


@dataclass(frozen=True)
class Job:
    """Everything of a replay but its policy and capacity.

    Attributes:
        accesses: the trace (semantics access). served: requests that are there already, or path: their file (semantics engine).
        warmup: requests or a share. kv_bytes: of a token, where a model was named. unit: what plain numbers of a capacity are.
    """

    semantics: str
    accesses: AccessTrace | None
    served: tuple[Served, ...] | None
    path: Path | None
    limit: int | None
    options: EngineOptions
    reading: ReadOptions
    warmup: int | float
    kv_bytes: int | None
    unit: str | None

    @classmethod
    def of(cls, trace: Trace, semantics: str = "access", limit: int | None = None, options: EngineOptions | None = None,
           warmup: int | float = 0, capacity_unit: str | None = None, model: Any = None, kv_dtype: str = "bfloat16",
           reading: ReadOptions | None = None, tests: Sequence[tuple[Eviction, object]] = ()) -> Job:  # fmt: skip
        """Check everything and read the trace (semantics access) or find its file (semantics engine).

        tests: policies and capacities that will be asked for; wrong ones end it before the trace is read.

        Raises:
            UserError: whatever is wrong.
        """
        if semantics not in SEMANTICS:
            raise unknown_name("semantics", semantics, SEMANTICS)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise UserError(f"limit = {limit!r} is not allowed: at least 1 request (leave it out for all).")
        if options is not None and semantics == "access":
            raise UserError("options (block size and step size of the engine) have no effect with semantics access. Leave them out.")
        num_warm(warmup, 2**62)
        kv_bytes = None if model is None else kv_bytes_per_token(model, kv_dtype)
        job = cls(semantics, None, None, None, limit, options or EngineOptions(), reading or ReadOptions(), warmup, kv_bytes, capacity_unit)
        for eviction, capacity in tests:
            policy_of(eviction)
            job.early_check(capacity)
        return job._with_trace(trace)

    def early_check(self, capacity: object) -> None:
        """What can be known of a capacity without the trace. UserError: it can't be one."""
        parse_capacity(capacity, self.unit).check(self.semantics == "access", self.kv_bytes)

    def _with_trace(self, trace: Trace) -> Job:
        if self.semantics == "access":
            return replace(self, accesses=as_trace(trace, self.limit, self.reading))
        if isinstance(trace, (str, Path)):
            return replace(self, path=self.reading.find(trace))
        if isinstance(trace, AccessTrace):
            raise UserError("Semantics engine needs lengths and tokens: give a trace's path, or requests as kvlab.replay.Served.")
        served: list[Served] = []
        for item in trace:
            if not isinstance(item, Served):
                raise UserError(f"Semantics engine takes a trace's path, or requests as kvlab.replay.Served; got {item!r:.60}.")
            served.append(item)
        return replace(self, served=tuple(served[: self.limit]))

    def num_blocks(self, capacity: Capacity) -> int:
        """A capacity in blocks of this trace. UserError: less than one, or not to be had for it."""
        if self.accesses is not None:
            tokens = self.accesses.block_tokens if self.accesses.input_lengths is not None else None
            needed = self.accesses.num_unique_blocks if capacity.unit == "share" else 0
            return capacity.num_blocks(tokens, needed, self.kv_bytes)
        if capacity.unit in ("blocks", "share"):
            return capacity.num_blocks(None, None, None)
        return capacity.num_blocks(real_block_tokens(self.path, self.options, self.reading), None, self.kv_bytes)

    def run(self, eviction: Eviction, capacity: object) -> ReplayResult:
        """One policy at one capacity. UserError, or IllegalDecision: the policy's fault."""
        policy, name = policy_of(eviction), policy_name(eviction)
        num_blocks = self.num_blocks(parse_capacity(capacity, self.unit))
        if self.accesses is not None:
            return self._run_access(self.accesses, policy, name, num_blocks)
        if self.path is not None:
            served, notes = open_served(self.path, self.options, self.limit, self.reading)
            result = replay_engine(served, policy, name, num_blocks, self.options, self.path.name)
            return replace(result, notes=tuple(notes)).with_warmup(self.warmup)
        return replay_engine(self.served or (), policy, name, num_blocks, self.options, "requests").with_warmup(self.warmup)

    def _run_access(self, trace: AccessTrace, policy: EvictionPolicy, name: str, num_blocks: int) -> ReplayResult:
        object_hits, prefix_hits, evicted = replay_access(trace, policy, num_blocks)
        lengths = trace.input_lengths
        return ReplayResult(
            trace=trace.name,
            policy=name,
            semantics="access",
            capacity=num_blocks,
            num_blocks_per_request=np.fromiter(map(len, trace.blocks), dtype=np.int32, count=len(trace.blocks)),
            object_hits_per_request=object_hits,
            prefix_hits_per_request=prefix_hits,
            hit_tokens_per_request=hit_tokens(trace, prefix_hits),
            tokens_per_request=None if lengths is None else np.asarray(lengths, dtype=np.int64),
            evicted=tuple(evicted),
            warmup=num_warm(self.warmup, len(trace.blocks)),
            notes=trace.notes,
        )


def policy_of(eviction: Eviction) -> EvictionPolicy:
    """A fresh policy from a name, class or object (its copy, as new: it may have served a run)."""
    if isinstance(eviction, str):
        policy: EvictionPolicy = by_name("eviction", eviction)
        return policy
    if isinstance(eviction, type) and issubclass(eviction, EvictionPolicy):
        return made(eviction)
    if isinstance(eviction, EvictionPolicy):
        fresh = copy.deepcopy(eviction)
        if hasattr(fresh, "reset"):
            fresh.reset()
        return fresh
    raise UserError(f"eviction = {eviction!r} is not allowed: a name such as 'lru', or an EvictionPolicy class or object.")


def policy_name(eviction: Eviction) -> str:
    """What results call it: its name, or its class."""
    if isinstance(eviction, str):
        return eviction
    return eviction.__name__ if isinstance(eviction, type) else type(eviction).__name__
