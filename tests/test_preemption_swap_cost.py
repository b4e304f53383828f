"""What a swap costs: what the mode cheaper_of_both reckons with, and what a simulated run pays."""

from __future__ import annotations

import pytest

from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.cost import ModelShape, Roofline
from kvlab.engine.engine import Engine
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.preemption.mode import CheaperOfBoth, Swap
from kvlab.policies.registry import by_name
from kvlab.types import Plan, Request, SamplingParams

BLOCK_BYTES = 2 << 20
SHAPE = ModelShape(8_000_000_000, 500_000_000, 2, 32, 131_072, 524_288, BLOCK_BYTES)


def serve(mode: object, gb_per_s: float, prefix_cache: str = "none") -> tuple[list[Plan], list[float]]:
    """Plans and step times (s): four requests of 40 tokens in and 40 out, B = 16, in 14 blocks."""
    cost = Roofline(transfer_gb_per_s=gb_per_s)
    cost.bind(SHAPE)
    config = EngineConfig(14, 16, num_cpu_blocks=40, max_model_len=400)
    policies = PolicySet(preemption=by_name("preemption", "lifo", mode=mode), prefix_cache=by_name("prefix_cache", prefix_cache))
    engine = Engine(config, policies, SimulatedRunner(500, cost), block_bytes=BLOCK_BYTES)
    for number in range(4):
        engine.add_request(Request(f"{number}", [number] * 40, SamplingParams(max_tokens=40, ignore_eos=True)))
    results = []
    while engine.has_work:
        results.append(engine.step())
    return [r.plan for r in results], [r.outcome.execute_s for r in results]


def test_a_simulated_run_pays_for_transfers_by_the_bandwidth_of_its_cost_model() -> None:
    """The same plans; at 2 * 10^9 B/s each block of 2 MiB takes 1.048576 ms more than at a thousand times that (1.048576 us)."""
    plans, seconds = serve(Swap(), 2.0)
    fast_plans, fast_seconds = serve(Swap(), 2000.0)
    assert [plan.decisions() for plan in plans] == [plan.decisions() for plan in fast_plans]
    moved = [len(plan.swap_in) + len(plan.swap_out) for plan in plans]
    assert sum(moved) >= 6
    for blocks, slow, fast in zip(moved, seconds, fast_seconds, strict=True):
        assert slow - fast == pytest.approx(blocks * 1.048576e-3 * 0.999, abs=1e-12)


def modes(mode: CheaperOfBoth, prefix_cache: str) -> set[str]:
    """How victims gave way."""
    return {victim.mode for plan in serve(mode, 25.0, prefix_cache)[0] for victim in plan.preempted}


def test_the_cheaper_way_depends_on_what_the_cache_keeps() -> None:
    """Victims hold about 48 tokens in 3 blocks. Two ways of 3 * 2 MiB at 20 * 10^9 B/s: 0.63 ms. Computing 48 tokens at 10,000 a second:
    4.8 ms, so swap. With a prefix cache all but the last block are kept: at most 15 tokens, 1.5 ms. At 50,000 a second that is 0.3 ms,
    and recompute; unless the cache is believed to keep nothing: 0.96 ms."""
    assert modes(CheaperOfBoth(20, 10_000), "none") == {"swap"}
    assert modes(CheaperOfBoth(20, 50_000), "none") == {"swap"}
    assert modes(CheaperOfBoth(20, 50_000), "hash") == {"recompute"}
    assert modes(CheaperOfBoth(20, 50_000, kept_share=0.0), "hash") == {"swap"}
    assert modes(CheaperOfBoth(20, 200_000), "none") == {"recompute"}  # 0.24 ms
