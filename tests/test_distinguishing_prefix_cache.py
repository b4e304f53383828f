"""Each prefix cache has a trace, worked out by hand, that no other policy of its seam passes: every policy is run over every trace."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import make_engine, policies, policy_names, prompt_of, reference_outputs, request, run_to_end, serve

from kvlab.policies.prefix_cache import Hash, Radix

NAMES = policy_names("prefix_cache")
Seen = tuple[Any, ...]


def nothing_is_kept(prefix_cache: Any) -> Seen:
    """B = 4. A prompt of 9, then the same again: (tokens computed, tokens hit, blocks cached in the end)."""
    engine, log = make_engine(10, 4, policies(prefix_cache=prefix_cache))
    for name in ("a", "again"):
        serve(engine, [request(name, prompt_of(9), 1)])
    return log.total("num_prompt_tokens_computed"), log.total("prefix_cache_hits"), engine.kv.pool.num_evictable


def duplicates(prefix_cache: Any) -> Seen:
    """B = 4. Two prompts of 9 that share 8 start cold in one step and run on; a third comes: (tokens it hits, blocks that the first two
    hold after the first step, blocks evicted first where FIFO needs one of a full pool's)."""
    engine, log = make_engine(10, 4, policies(prefix_cache=prefix_cache, eviction="fifo", admission="none"))
    pair = [request(name, [*prompt_of(8), last], 3) for name, last in (("a", 1), ("b", 2))]
    for each in pair:
        engine.add_request(each)
    engine.step()
    num_held = engine.kv.pool.num_used
    run_to_end(engine, 10)
    serve(engine, [request("c", [*prompt_of(8), 3], 1)])
    serve(engine, [request("d", prompt_of(36, 9), 1)])  # 9 blocks: one more than is free beside two that are cached
    assert {name: log.outputs[name] for name in "ab"} == reference_outputs(pair)
    return log.records["c"].num_cached_tokens, num_held, tuple(log.blocks_of("evict"))


TRACES = {
    "none": (nothing_is_kept, (18, 0, 0)),  # the others compute 9 + 1 and keep 2 blocks
    # The second keeps its own two blocks: 3 + 3. FIFO gives up the head, block 0, whose continuation can't be found any more.
    "hash": (duplicates, (8, 6, (0,))),
    # The second's two go back and it takes the first's: 3 + 1. Leaves first: the tail, block 1.
    "radix": (duplicates, (8, 4, (1,))),
}


@pytest.mark.parametrize("owner", NAMES)
def test_only_the_owner_passes_its_trace(owner: str) -> None:
    trace, expected = TRACES[owner]
    passed = [name for name in NAMES if trace(name) == expected]
    assert passed == [owner], "a new policy needs its row in TRACES"


# (tokens of "a" cached, tokens that "b" hits, tokens that "c" hits) by setting. B = 4: "a" has a prompt of 10 and 4 out, 13 computed: 3
# full blocks, the last of which holds 2 generated tokens. "b" begins with the first 7 tokens of "a", "c" with all 14.
SETTINGS = {
    "hash": (Hash(), (12, 4, 12)),
    "radix": (Radix(), (12, 4, 12)),
    "at least 5": (Hash(min_match_tokens=5), (12, 0, 12)),
    "at least 5, in a tree": (Radix(min_match_tokens=5), (12, 0, 12)),
    "prompts only": (Hash(cache_generated=False), (8, 4, 8)),
    "prompts only, in a tree": (Radix(cache_generated=False), (8, 4, 8)),
    "copies": (Radix(partial_block_copy=True), (12, 7, 12)),
    "copies, at least 8": (Radix(min_match_tokens=8, partial_block_copy=True), (12, 0, 12)),
    "copies, prompts only": (Radix(cache_generated=False, partial_block_copy=True), (8, 7, 8)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_does_what_it_says(name: str) -> None:
    policy, (cached, short, long) = SETTINGS[name]
    engine, log = make_engine(20, 4, policies(prefix_cache=policy))
    serve(engine, [request("a", prompt_of(10), 4)])
    assert engine.kv.pool.num_evictable * 4 == cached
    whole = [*prompt_of(10), *log.outputs["a"][0][0]]
    later = [request("c", [*whole, 1], 2), request("b", [*whole[:7], (whole[7] + 1) % 97, 5], 2)]
    for each in later:
        serve(engine, [each])
    assert [log.records[name].num_cached_tokens for name in "bc"] == [short, long]
    assert {name: log.outputs[name] for name in "bc"} == reference_outputs(later)
