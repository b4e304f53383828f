"""Pins, leaves and the queue in the engine: what is in use, who gives way to whom, and that no request ends for a pin's sake."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import Forcer, Log, make_engine, policies, prompt_of, reference_outputs, request, run_to_end, serve

from kvlab.engine import Engine
from kvlab.policies.eviction import LeafFirst, Lru, Pinned, QueueInformed, Sieve, Ttl
from kvlab.types import Request

SHARED = prompt_of(8, 1)  # two blocks of 4


def with_pins(num_blocks: int, **limits: Any) -> tuple[Engine, Log, list[Request]]:
    """An engine in which the two blocks of the shared prompt are pinned, all others free or evictable."""
    engine, log = make_engine(num_blocks, 4, policies(eviction=Pinned(max_fraction=0.3), **limits.pop("seams", {})), **limits)
    requests = [request(f"shares {i}", [*SHARED, i], 1) for i in range(4)]
    for each in requests:
        serve(engine, [each])
    pool = engine.kv.pool
    assert (pool.num_pinned, pool.num_used, pool.num_held) == (2, 2, 0)
    return engine, log, requests


def pinned_contents(engine: Engine) -> list[bytes]:
    pool = engine.kv.pool
    assert pool.eviction is not None
    return [block.content for block in pool.blocks if pool.eviction.is_pinned(block.block_id)]


def test_a_pin_outlives_a_flood_of_other_prompts() -> None:
    """20 prompts of 5 blocks pass through the 6 that are left of 8; then the shared prompt is hit as a whole. LRU loses it."""
    hits = {}
    for name, policy in {"pinned": Pinned(max_fraction=0.3), "lru": Lru()}.items():
        engine, log = make_engine(8, 4, policies(eviction=policy))
        flood = [request(f"other {i}", prompt_of(17, 10 + i), 3) for i in range(20)]
        for each in [request("first", [*SHARED, 1], 1), request("second", [*SHARED, 2], 1), *flood, request("last", [*SHARED, 3], 1)]:
            serve(engine, [each])
        hits[name] = log.records["last"].num_cached_tokens
        assert log.total("num_evicted_blocks") > 60
    assert hits == {"pinned": 8, "lru": 0}


def test_pins_are_in_use_in_the_records_and_to_admission() -> None:
    """2 of 8 blocks are pinned, 0 evictable and 6 free; a prompt of 6 blocks enters beside nobody, a second one waits for blocks."""
    engine, log, _ = with_pins(8)
    stats = log.stats[-1]
    assert (stats.kv_blocks_used, stats.kv_blocks_evictable, stats.kv_blocks_free) == (2, 0, 6)
    both = [request("six", prompt_of(24, 2), 1), request("one", prompt_of(4, 3), 1)]
    for each in both:
        engine.add_request(each)
    engine.step()
    assert [blocked.request_id for blocked in log.plans[-1].blocked] == ["one"]
    run_to_end(engine, 10)
    assert log.total("num_evicted_blocks") == 1  # a block of six's, for one
    assert engine.kv.pool.num_pinned == 2


@pytest.mark.parametrize(("prompt", "max_tokens"), [(25, 1), (29, 2), (31, 2), (32, 1), (4, 29), (24, 9)])
def test_pins_are_given_up_for_a_request_that_is_alone_and_fits_only_in_their_place(prompt: int, max_tokens: int) -> None:
    """7 or 8 of 8 blocks, for the prompt or while the output grows: it runs to its end, as in a pool without pins."""
    engine, log, requests = with_pins(8)
    big = request("big", prompt_of(prompt, 4), max_tokens)
    serve(engine, [big])
    assert log.records["big"].finish_reason == "length"
    assert log.outputs == reference_outputs([*requests, big])
    assert engine.kv.pool.num_pinned == 0
    assert log.total("num_preemptions") == 0


def test_a_request_hits_pins_that_are_given_up_for_it() -> None:
    """It begins with the shared prompt and needs all 8 blocks: two hits and six new ones; nothing is given up. One more does not fit."""
    engine, log, requests = with_pins(8)
    whole = request("whole", [*SHARED, *prompt_of(24, 5)], 1)
    serve(engine, [whole])
    assert (log.records["whole"].num_cached_tokens, log.total("num_evicted_blocks")) == (8, 0)
    assert log.outputs == reference_outputs([*requests, whole])


def test_running_requests_give_way_before_a_pin_does() -> None:
    """Two that grow to 4 blocks each share 6 with nobody: the newer is preempted while a pin is there, and nothing pinned goes."""
    engine, log, requests = with_pins(8)
    pinned = pinned_contents(engine)
    pair = [request("old", prompt_of(8, 6), 8), request("new", prompt_of(8, 7), 8)]
    serve(engine, pair)
    assert [p.request_id for plan in log.plans for p in plan.preempted] == ["new"]
    assert pinned_contents(engine) == pinned
    assert not {event.content for event in log.events if event.kind == "evict"} & {content.hex() for content in pinned}
    assert log.outputs == reference_outputs([*requests, *pair])


def test_pins_are_given_up_for_a_swapped_request_that_comes_back_alone() -> None:
    """It holds 6 blocks when it is swapped out; meanwhile nothing else changes. With the next token's it needs 7, and two are pinned."""
    engine, log, requests = with_pins(8, seams={"mode": "swap"}, num_cpu_blocks=10)
    forcer = Forcer(engine)
    alone = request("alone", prompt_of(23, 8), 9)
    engine.add_request(alone)
    engine.step()
    engine.step()  # 24 tokens are computed, and the next one needs a block
    forcer.before.append("alone")
    run_to_end(engine, 40)
    assert log.total("swapped_in_blocks") == 6
    assert log.records["alone"].finish_reason == "length"
    assert engine.kv.pool.num_pinned == 0
    assert log.outputs == reference_outputs([*requests, alone])


def test_what_waits_is_spared() -> None:
    """8 blocks: two of P, two of Q, four free; BIG needs five, and P waits behind it. LRU gives up P's tail, which P then misses."""
    cached = {}
    for name, policy in {"lru": Lru(), "queue_informed": QueueInformed(), "of sieve": QueueInformed(Sieve())}.items():
        engine, log = make_engine(8, 4, policies(eviction=policy), max_num_seqs=1)
        for each in (request("p", prompt_of(9, 1), 1), request("q", prompt_of(9, 2), 1)):
            serve(engine, [each])
        last = [request("big", prompt_of(17, 3), 1), request("p again", prompt_of(9, 1), 1)]
        serve(engine, last)
        cached[name] = log.records["p again"].num_cached_tokens
    assert cached == {"lru": 4, "queue_informed": 8, "of sieve": 8}


def test_a_leaf_goes_where_content_was_computed_twice() -> None:
    """Two requests compute the same first block in one step; it is the first one's that is published, the second one's continuation hangs
    on it. The first ends first, so its block is the least recently used, and a leaf only in the eyes of a list: LRU evicts it, and the
    continuation can't be found any more."""
    cached = {}
    for name, policy in {"lru": Lru(), "leaf_first": LeafFirst()}.items():
        engine, log = make_engine(4, 4, policies(eviction=policy))
        first, second = request("first", SHARED[:4], 1), request("second", SHARED, 2)
        serve(engine, [first, second])
        assert log.total("prefix_cache_hits") == 0
        serve(engine, [request("other", prompt_of(12, 9), 1)])
        assert log.total("num_evicted_blocks") == 1
        serve(engine, [request("again", SHARED[:5], 1)])
        cached[name] = log.records["again"].num_cached_tokens
    assert cached == {"lru": 0, "leaf_first": 4}


def test_a_time_to_live_by_the_engines_clock() -> None:
    """The conversation came back: its blocks outlive one that is newer, until they expire. (LRU would give them up in both cases.)"""
    for seconds, kept in ((59.0, 8), (61.0, 0)):
        engine, log = make_engine(6, 4, policies(eviction=Ttl(ttl_s=60.0, new_ttl_s=0.0)))
        for i in range(2):
            serve(engine, [request(f"turn {i}", [*SHARED, i], 1)])
        start_s = log.stats[-1].end_s
        for name, prompt, now_s in (("newer", prompt_of(9, 2), start_s + seconds - 0.5), ("big", prompt_of(16, 3), start_s + seconds)):
            engine.add_request(request(name, prompt, 1))
            engine.step(now_s=now_s)
        engine.add_request(request("turn 2", [*SHARED, 2], 1))
        engine.step(now_s=start_s + seconds)
        assert log.records["turn 2"].num_cached_tokens == kept
