"""Semantics `access`: a classic cache simulation that drives the engine's own eviction policies, without an engine.

Demand fill: every id of every request, head to tail, is one access. A miss inserts the block at once, evicting one when the cache
holds `capacity`; nothing stays held. The policy hears the engine's events (kvlab.policies.base): miss, [evict], insert, release on a
miss, hit, release on a hit. Ticks count insert, hit and release.

A request whose blocks are kept out of the cache from some position on (`AccessTrace.cache_until`) looks for all of them, and a hit is a
hit; a miss from that position on brings nothing in, evicts nothing, and the policy does not hear of it.

A policy whose class has a `demand_fill` of its own (lru) is asked for all at once: the same decisions without events, far faster. A
subclass that does not bring its own is replayed by events.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

import numpy as np

from kvlab.cache.pool import CachedBlock
from kvlab.policies.base import EvictionPolicy
from kvlab.replay.result import IntArray
from kvlab.replay.trace import AccessTrace
from kvlab.types import IllegalDecision, Now


def replay_access(trace: AccessTrace, policy: EvictionPolicy, capacity: int) -> tuple[IntArray, IntArray, list[bytes]]:
    """(object hits by request, prefix hits by request, contents evicted in order). IllegalDecision: a victim not in the cache."""
    capacity = min(capacity, max(1, trace.num_accesses))  # with more nothing is ever evicted; a policy may set a byte a block aside
    if "demand_fill" in vars(type(policy)) and trace.cache_until is None:
        object_hits, prefix_hits, gone = type(policy).demand_fill(policy, trace.blocks, capacity)  # type: ignore[attr-defined]
        return np.array(object_hits, dtype=np.int32), np.array(prefix_hits, dtype=np.int32), _contents(gone)
    return replay_events(trace, policy, capacity)


def replay_events(trace: AccessTrace, policy: EvictionPolicy, capacity: int) -> tuple[IntArray, IntArray, list[bytes]]:
    """The same, telling the policy every event. One function, since at a microsecond an access each further call would show."""
    if policy.sees_future:
        policy.foresee([str(block_id).encode() for block_id in request] for request in trace.blocks)
    policy.bind(capacity)
    cached: dict[Hashable, CachedBlock] = {}
    blocks: list[CachedBlock] = []  # by block id; grows to `capacity`
    ids_of: list[Hashable] = []  # by block id: the trace's id in it
    object_hits: list[int] = []
    prefix_hits: list[int] = []
    evicted: list[bytes] = []
    on_hit, on_release, on_evict, victim = policy.hit, policy.release, policy.evict, policy.victim
    on_miss = policy.miss if _listens(policy, "miss") else None
    on_insert = policy.insert if _listens(policy, "insert") else None
    find = cached.get
    num_blocks = tick = 0
    limits, limit = trace.num_cacheable_blocks(), sys.maxsize
    for number, (request, now_s) in enumerate(zip(trace.blocks, trace.times_s, strict=True)):
        now = Now(number, now_s)
        parent: bytes | None = None
        num_hits = 0
        prefix = -1  # not known yet: all were hits so far
        if limits is not None:
            limit = limits[number]
        for depth, block_id in enumerate(request):
            tick += 2
            block = find(block_id)
            if block is not None:
                num_hits += 1
                block.num_hits += 1
                block.ref_count = 1
                block.counted_tick = block.used_tick = tick - 1
                block.used_s = now_s
                on_hit(block, now)
                block.ref_count = 0
                parent = block.content
            else:
                if prefix < 0:
                    prefix = num_hits
                if depth >= limit:
                    tick -= 2
                    continue
                content = str(block_id).encode()
                if on_miss is not None:
                    on_miss(content, now)
                if num_blocks < capacity:
                    block = CachedBlock(num_blocks, trace.block_tokens)
                    blocks.append(block)
                    ids_of.append(block_id)
                    num_blocks += 1
                else:
                    place = victim(now)
                    if place.__class__ is not int or not 0 <= place < num_blocks:
                        raise IllegalDecision("eviction", policy, f"evict block {place!r}", f"a block id in [0, {num_blocks})")
                    block = blocks[place]
                    on_evict(block, now)
                    evicted.append(block.content)
                    del cached[ids_of[place]]
                    ids_of[place] = block_id
                cached[block_id] = block
                block.content, block.parent, block.depth, block.num_hits = content, parent, depth, 0
                block.inserted_tick = block.counted_tick = tick - 1
                block.inserted_s = block.used_s = now_s
                if on_insert is not None:  # else nobody looks before the release
                    block.ref_count = 1
                    block.used_tick = tick - 1
                    on_insert(block, now)
                    block.ref_count = 0
                parent = content
            block.used_tick = tick
            on_release(block, now, False)
        object_hits.append(num_hits)
        prefix_hits.append(num_hits if prefix < 0 else prefix)
    return np.array(object_hits, dtype=np.int32), np.array(prefix_hits, dtype=np.int32), evicted


def _contents(ids: Sequence[Hashable]) -> list[bytes]:
    """The ids as text, in one go where that can be told apart again."""
    contents = "\n".join(map(str, ids)).encode().split(b"\n")
    return contents if len(contents) == len(ids) else [str(block_id).encode() for block_id in ids]


def _listens(policy: EvictionPolicy, event: str) -> bool:
    """Whether a policy's class (or the object itself) implements an optional event."""
    return getattr(getattr(policy, event), "__func__", None) is not getattr(EvictionPolicy, event)
