"""Recompute tax by victim (vLLM RFC 54644, its order only): least_computed < lifo < random < most_computed on heterogeneous lengths.

The figure is `experiments/recompute_tax`; this is the same comparison, small. protect_oldest is off, as the comparison of victims alone
wants it.
"""

from __future__ import annotations

from functools import cache
from random import Random
from statistics import median

import pytest

from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.engine import Engine
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.registry import by_name
from kvlab.types import Request, SamplingParams

SEEDS = range(3)


@cache
def tax(victim: str, seed: int) -> tuple[float, float]:
    """(recomputed tokens / computed tokens, recomputed tokens a preemption). 60 requests of 16 to 256 tokens in and out, all there at the
    start, in a pool of 160 blocks of 16: a tenth of what they come to."""
    draw = Random(seed)
    parameters = {"seed": seed} if victim == "random" else {}
    policies = PolicySet(admission=by_name("admission", "full_sequence"), prefix_cache=by_name("prefix_cache", "none"),
                         preemption=by_name("preemption", victim, protect_oldest=False, **parameters))  # fmt: skip
    engine = Engine(EngineConfig(160, 16, max_num_batched_tokens=512), policies, SimulatedRunner(500))
    for number in range(60):
        sampling = SamplingParams(max_tokens=draw.randint(16, 256), ignore_eos=True)
        engine.add_request(Request(f"{number}", [number] * draw.randint(16, 256), sampling))
    computed = recomputed = num_preemptions = 0
    while engine.has_work:
        result = engine.step()
        computed += result.plan.num_new_tokens
        recomputed += result.stats.recomputed_tokens
        num_preemptions += len(result.plan.preempted)
        assert result.plan.step < 20_000, "nobody gets on"
    return recomputed / computed, recomputed / num_preemptions


def test_recompute_tax_by_victim() -> None:
    """Medians over the seeds. What makes the order: each loss is that of its victim, and the smallest loss is what least_computed picks."""
    taxes, losses = {}, {}
    for victim in ("least_computed", "lifo", "random", "most_computed"):
        runs = [tax(victim, seed) for seed in SEEDS]
        taxes[victim], losses[victim] = median(run[0] for run in runs), median(run[1] for run in runs)
    assert taxes["least_computed"] < taxes["lifo"] < taxes["random"] < taxes["most_computed"], taxes
    assert losses["least_computed"] < losses["lifo"] < losses["random"] < losses["most_computed"], losses


@pytest.mark.slow
def test_a_victim_by_cost_loses_less_each_time_than_the_last_to_come() -> None:
    """Without a cache blocks a token are nearly the same for all, so cost_aware picks the short ones: it loses less each time than lifo,
    and has a lower tax than the choice by blocks alone."""
    runs = {victim: [tax(victim, seed) for seed in SEEDS] for victim in ("cost_aware", "lifo", "most_blocks")}
    assert median(run[1] for run in runs["cost_aware"]) < median(run[1] for run in runs["lifo"]), runs
    assert median(run[0] for run in runs["cost_aware"]) < median(run[0] for run in runs["most_blocks"]), runs
