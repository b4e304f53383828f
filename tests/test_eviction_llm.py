"""Eviction policies made for LLM serving: formulas, orders and edge cases worked out by hand, on the real block pool."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from eviction_stage import Stage, evicted

from kvlab.cache.pool import BlockPool
from kvlab.policies.eviction import (
    CostAware,
    LengthAware,
    Lru,
    Marconi,
    NeverHitFirst,
    Tlru,
    Ttl,
)
from kvlab.policies.eviction._flops import block_flops
from kvlab.policies.registry import by_name
from kvlab.types import UserError

# ------------------------------------------------------------------------------ FLOPs


@pytest.mark.parametrize(("depth", "flops"), [(0, 12 + 4 * 3), (1, 12 + 4 * 7), (2, 12 + 4 * 11)])
def test_flops_of_a_block(depth: int, flops: float) -> None:
    """2 tokens, 3 parameters, one layer of size 1: 2 * 3 * 2 for the matrices; the tokens see 1 + 2, 3 + 4, 5 + 6 keys."""
    assert block_flops(depth, 2, num_params=3, num_layers=1, hidden_size=1) == flops


def test_flops_add_up_over_the_blocks_of_a_prompt() -> None:
    """Four blocks of 3 tokens cost what one of 12 does."""
    shape = {"num_params": 5, "num_layers": 2, "hidden_size": 7}
    assert sum(block_flops(depth, 3, **shape) for depth in range(4)) == block_flops(0, 12, **shape)


# ------------------------------------------------------------------- sorts by a key


def test_length_aware_takes_the_latest_block_among_those_with_fewest_hits() -> None:
    """x was there first, c stands latest. Then b, then by age. A hit counts for more than a place: d (depth 1, one hit) outlives x."""
    assert evicted(LengthAware(), 4, "x abc y z") == "cb"
    assert evicted(LengthAware(), 3, "ad ad x y") == "x"


def test_never_hit_first_does_not_count() -> None:
    """Three hits or one: the least recently used of the hit ones goes, but only when no block without a hit is left."""
    assert evicted(NeverHitFirst(), 3, "a a a b b c d") == "c"
    assert evicted(NeverHitFirst(), 3, "a a a a b b c c d") == "a"


def test_cost_aware_weighs_uses_with_flops() -> None:
    """P = 2, L H = 1, one token: block d costs 4 + 4 (d + 1): 8, 12, 16, 20. x, hit once, is worth 16; c (depth 2) as much and older;
    d (depth 3) 20 without a hit."""
    shape = {"num_params": 2, "num_layers": 1, "hidden_size": 1}
    assert evicted(CostAware(**shape), 5, "abcd x x pqr", block_size=1) == "abc"
    assert evicted(CostAware(**shape), 5, "abcd x x pqrs", block_size=1) == "abcx"


def test_a_model_whose_attention_costs_nothing_makes_cost_aware_lfu_by_use() -> None:
    """So many parameters that attention is lost in rounding: every block costs the same, so hits decide, and then the last use."""
    assert evicted(CostAware(num_params=1e18, num_layers=1, hidden_size=1), 4, "abc x x y z", block_size=1) == "cb"


# ---------------------------------------------------------------------------- marconi


def scores_by_hand(marconi: Marconi, pool: BlockPool) -> dict[int, float]:
    """The definition, over all candidates: both values scaled to [0, 1]."""
    candidates = [block for block in pool.blocks if block.content and not block.ref_count]
    ticks = [block.used_tick for block in candidates]
    flops = [block_flops(block.depth, 64, 1e6, 2, 64) for block in candidates]

    def scaled(values: list[Any]) -> list[float]:
        low, span = min(values), max(values) - min(values)
        return [(value - low) / span if span else 0.0 for value in values]

    scaled_values = zip(candidates, scaled(ticks), scaled(flops), strict=True)
    return {block.block_id: recency + marconi.alpha * saved for block, recency, saved in scaled_values}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 4.0])
def test_marconi_is_its_definition_up_to_32_candidates(alpha: float) -> None:
    """400 random requests on 32 blocks; before each eviction the victim is the one of the definition."""
    draw = Random(1)
    policy = Marconi(alpha=alpha, num_params=1e6, num_layers=2, hidden_size=64)
    stage = Stage(policy, 32, block_size=64)
    for _ in range(400):
        family, length = draw.randint(0, 12), draw.randint(1, 8)
        stage.serve("".join(chr(1000 + 10 * family + depth) for depth in range(length)))
        scores = scores_by_hand(policy, stage.pool)
        assert scores[policy.victim(stage.pool.now)] <= min(scores.values()) + 1e-9
    assert len(stage.gone) > 300


def test_marconi_without_flops_is_lru() -> None:
    draw = Random(2)
    requests = []
    for _ in range(600):
        family = draw.randint(0, 30)
        requests.append("".join(chr(1000 + 10 * family + depth) for depth in range(draw.randint(1, 8))))
    assert Stage(Marconi(alpha=0), 80).serve(*requests) == Stage(Lru(), 80).serve(*requests) != ""


def test_marconi_measures_seldom_and_is_near_its_definition_above_32_candidates() -> None:
    """In a pool of 400 the victim's score is less than 0.15 of at most 2 above the smallest, 0.02 on average: the scales are older than
    the candidates."""
    draw = Random(3)
    policy = Marconi(num_params=1e6, num_layers=2, hidden_size=64)
    stage = Stage(policy, 400, block_size=64)
    measured, measure = [0], policy._measure

    def count() -> None:
        measured[0] += 1
        measure()

    policy._measure = count  # type: ignore[method-assign]
    worst = total = 0.0
    for _ in range(2000):
        family, length = draw.randint(0, 300), draw.randint(1, 8)
        stage.serve("".join(chr(1000 + 10 * family + depth) for depth in range(length)))
        if stage.gone:
            scores = scores_by_hand(policy, stage.pool)
            worst = max(worst, scores[policy.victim(stage.pool.now)] - min(scores.values()))
            total += scores[policy.victim(stage.pool.now)] - min(scores.values())
    assert 0 < worst < 0.15
    assert total / 2000 < 0.02
    assert len(stage.gone) > 4000
    assert measured[0] < len(stage.gone) / 80


# --------------------------------------------------------------------------------- ttl


def test_ttl_a_conversation_that_came_back_outlives_newer_ones_until_it_expires() -> None:
    """ab comes back as abc at 10 s and lives until 70 s: at 69.9 s everything newer goes before it, at 70 s it goes, tail first."""
    stage = Stage(Ttl(ttl_s=60), 5)
    stage.serve("ab")
    stage.at(10.0).serve("abc")
    assert stage.at(20.0).serve("x", "y") == ""
    assert stage.at(69.9).serve("z") == "x"
    assert stage.serve("w") == "xy"
    assert stage.at(69.95).serve("v") == "xyz"  # expired at 69.9, before the others do
    assert stage.at(130.0).serve("u") == "xyzw"
    assert stage.serve("t") == "xyzwv"
    assert stage.serve("s") == "xyzwvc"  # expired at 70 s, u and t now


def test_ttl_when_all_are_alive_the_least_recently_used_goes() -> None:
    """Everything lives 30 s."""
    stage = Stage(Ttl(ttl_s=30, new_ttl_s=30), 3)
    assert stage.serve("a", "b", "c", "a", "d") == "b"


def test_ttl_knows_a_continuation_from_a_branch() -> None:
    """s is shared. sa comes back as sab: b goes on with a conversation. sc is a new branch below s, which a continues already, though s
    was hit; scd goes on with it."""
    stage = Stage(Ttl(ttl_s=60), 5)
    stage.serve("sa", "sab", "sc")  # s a b c: one is free
    stage.at(1.0)
    assert stage.serve("x") == ""
    assert stage.serve("y") == "c"  # never came back; b, older, did
    stage.serve("sc")  # takes x, which has expired as well, and before y
    assert stage.gone == "cx"
    assert stage.serve("scd") == "cxy"  # c came back: it and d are kept with s, a, b
    assert stage.at(2.0).serve("z") == "cxyb"  # all are alive: the least recently used


def test_ttl_the_blocks_of_a_continuation_all_count() -> None:
    """b continues a, which was hit; c continues b."""
    stage = Stage(Ttl(ttl_s=60), 4)
    stage.serve("a", "abc", "x")
    assert stage.at(1.0).serve("y") == "x"


# -------------------------------------------------------------------------------- tlru


def test_tlru_gives_up_what_a_turn_can_compute_in_time() -> None:
    """Blocks of 256, xi = 1024, 128 new tokens: 3 blocks of a conversation may be missing (896), 4 not (1152). Of abcdef the last three
    go, then all of the short xy, then the last three of klmno."""
    assert evicted(Tlru(), 8, "abcdef xy klmno q rst u", 256) == "fedyx" + "o" + "nmq" + "t"


def test_tlru_is_lru_when_no_conversation_can_spare_a_block() -> None:
    """Four have to go for klmnop: f, e, d, and then c, the least recently used of a, b, c. Six for qrstuv: p, o, n, then b, a, m."""
    assert evicted(Tlru(), 8, "abcdef klmnop qrstuv", 256) == "fedc" + "ponbam"


def test_tlru_without_a_threshold_is_lru() -> None:
    draw = Random(5)
    requests = []
    for _ in range(300):
        family = draw.randint(0, 12)
        requests.append("".join(chr(1000 + 10 * family + depth) for depth in range(draw.randint(1, 8))))
    assert Stage(Tlru(threshold_tokens=0), 20).serve(*requests) == Stage(Lru(), 20).serve(*requests) != ""


def test_tlru_a_conversation_grows_with_its_turns() -> None:
    """One block may be missing (xi 16, nothing new expected, blocks of 16). Of ab, b may go; once it has become abc only c may, and b is
    kept though it is older than x."""
    policy = Tlru(threshold_tokens=16, next_prompt_tokens=0)
    stage = Stage(policy, 4)
    stage.serve("ab", "abc", "x")
    assert stage.serve("y") == "c"
    assert stage.serve("z") == "cx"  # of abc still b is needed, as far as one knows
    assert stage.serve("w") == "cxy"


def test_tlru_hears_of_a_longer_conversation_below_a_candidate() -> None:
    """Duplicates of content: the first request lets go of its a while the second, whose b continues it, still runs. Then b is let go,
    and a is no longer the end of its conversation."""
    policy = Tlru(threshold_tokens=16, next_prompt_tokens=0)
    stage = Stage(policy, 3)
    first = stage.hold("a")
    second = stage.pool.allocate(2)  # computes the content of a again, and b
    assert second is not None
    assert not stage.pool.publish(second[0], b"a", None, 0)
    assert stage.pool.publish(second[1], b"b", b"a", 1)
    stage.let_go(first)
    stage.let_go(second)
    assert stage.serve("xy") == "b"


# ------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("name", "parameters", "allowed"),
    [
        ("cost_aware", {"num_params": 0}, "above 0"), ("cost_aware", {"hidden_size": "4096"}, "above 0"),
        ("cost_aware", {"num_layers": float("inf")}, "above 0"), ("marconi", {"alpha": -0.1}, "at least 0"),
        ("marconi", {"alpha": float("nan")}, "at least 0"), ("marconi", {"num_layers": 0}, "above 0"), ("ttl", {"ttl_s": 0}, "above 0"),
        ("ttl", {"ttl_s": float("inf")}, "above 0"), ("ttl", {"new_ttl_s": -1}, "at least 0"), ("ttl", {"new_ttl_s": True}, "at least 0"),
        ("tlru", {"threshold_tokens": -1}, "at least 0"), ("tlru", {"next_prompt_tokens": 1.5}, "an integer of at least 0"),
        ("queue_informed", {"num_waiting": 0}, "at least 1"), ("pinned", {"mode": "firm"}, '"hard"'),
        ("pinned", {"depth_tokens": 0}, "at least 1"), ("pinned", {"min_hits": -1}, "at least 0"),
        ("pinned", {"max_fraction": 1.0}, r"\(0, 1\)"), ("pinned", {"max_fraction": 0}, r"\(0, 1\)"),
        ("leaf_first", {"inner": 3}, "an eviction policy, or None"), ("leaf_first", {"inner": "seive"}, "Did you mean 'sieve'"),
    ],
)  # fmt: skip
def test_parameters_out_of_range(name: str, parameters: dict[str, Any], allowed: str) -> None:
    with pytest.raises(UserError, match=allowed):
        by_name("eviction", name, **parameters)
