"""Semantics `access`: a classic cache simulation that drives the engine's own eviction policies, without an engine.

Demand fill: every id of every request, head to tail, is one access. A miss inserts the block at once, evicting one when the cache
holds `capacity`; nothing stays held. The policy hears the engine's events (kvlab.policies.base): [evict], insert, release on a
miss, hit, release on a hit. Ticks count insert, hit and release.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from kvlab.cache.pool import CachedBlock
from kvlab.policies.base import EvictionPolicy
from kvlab.replay.result import IntArray
from kvlab.replay.trace import AccessTrace
from kvlab.types import IllegalDecision, Now


def replay_access(trace: AccessTrace, policy: EvictionPolicy, capacity: int) -> tuple[IntArray, IntArray, list[bytes]]:
    """(object hits by request, prefix hits by request, contents evicted in order). IllegalDecision: a victim not in the cache."""
    cached: dict[Hashable, CachedBlock] = {}
    blocks: list[CachedBlock] = []  # by block id; grows to `capacity`
    ids_of: list[Hashable] = []  # by block id: the trace's id in it
    object_hits = np.zeros(len(trace.blocks), dtype=np.int32)
    prefix_hits = np.zeros(len(trace.blocks), dtype=np.int32)
    evicted: list[bytes] = []
    on_insert, on_hit, on_release = policy.insert, policy.hit, policy.release
    find = cached.get
    tick = 0
    for number, request in enumerate(trace.blocks):
        now = Now(number, trace.times_s[number])
        now_s = now.now_s
        parent: bytes | None = None
        num_hits = prefix = 0
        for depth, block_id in enumerate(request):
            tick += 1
            block = find(block_id)
            if block is not None:
                if num_hits == depth:
                    prefix += 1
                num_hits += 1
                block.num_hits += 1
                block.ref_count = 1
                block.counted_tick = block.used_tick = tick
                block.used_s = now_s
                on_hit(block, now)
            else:
                if len(blocks) < capacity:
                    block = CachedBlock(len(blocks), trace.block_tokens)
                    blocks.append(block)
                    ids_of.append(block_id)
                else:
                    block = _evict(policy, blocks, now)
                    evicted.append(block.content or b"")
                    del cached[ids_of[block.block_id]]
                    ids_of[block.block_id] = block_id
                cached[block_id] = block
                block.content, block.parent, block.depth, block.num_hits = f"{block_id}".encode(), parent, depth, 0
                block.ref_count = 1
                block.inserted_tick = block.counted_tick = block.used_tick = tick
                block.inserted_s = block.used_s = now_s
                on_insert(block, now)
            tick += 1
            block.ref_count = 0
            block.used_tick = tick
            on_release(block, now, False)
            parent = block.content
        object_hits[number], prefix_hits[number] = num_hits, prefix
    return object_hits, prefix_hits, evicted


def _evict(policy: EvictionPolicy, blocks: list[CachedBlock], now: Now) -> CachedBlock:
    """Ask for a victim and tell that it is gone."""
    victim = policy.victim(now)
    if not isinstance(victim, int) or not 0 <= victim < len(blocks):
        raise IllegalDecision("eviction", policy, f"evict block {victim!r}", f"a block id in [0, {len(blocks)})")
    block = blocks[victim]
    policy.evict(block, now)
    return block
